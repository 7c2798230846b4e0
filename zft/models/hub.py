"""From what the user wrote as `model=` to a local folder: a folder, a .gguf file (converted once), or a Hub id."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from zft.config import ZftError
from zft.models.source import ALLOW_PICKLE

log = logging.getLogger(__name__)

# what a causal LM needs of its repository; other formats and second copies of the weights stay there
WANTED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "README.md", "LICENSE*"]
UNWANTED = ["consolidated*", "*.fp16.safetensors", "original/*", "metal/*", "onnx/*", "openvino/*", "coreml/*"]


def resolve_model(model: str, revision: str | None = None) -> Path:
    """Local folder of a model: `model` is a folder, a `.gguf` file or a Hub id (downloaded or found in the cache).

    Raises ZftError in one line: nothing there, gated (with the page of the licence), not found, or no network.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return convert_gguf(path.resolve())
        raise ZftError(f"model={model} is a file; give a model folder, a .gguf file or a Hub id")
    if _looks_local(model):
        raise ZftError(f"model={model} does not exist; give a model folder, a .gguf file or a Hub id such as org/name")
    return _download(model, revision)


def is_hub_id(model: str) -> bool:
    """Whether `model` names a Hub repository rather than something on this machine."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    if Path(model).expanduser().exists() or _looks_local(model):
        return False
    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return True


def _looks_local(model: str) -> bool:
    return (
        model.startswith((".", "/", "~", "\\"))
        or model.count("/") > 1
        or "\\" in model
        or model.lower().endswith(".gguf")
    )


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    wanted = [*WANTED, "pytorch_model*.bin"] if os.environ.get(ALLOW_PICKLE) == "1" else WANTED
    try:
        folder = snapshot_download(model, revision=revision, allow_patterns=wanted, ignore_patterns=UNWANTED)
    except errors.HFValidationError as error:
        raise ZftError(f"model={model} is neither a folder, a .gguf file nor a valid Hub id") from error
    except errors.GatedRepoError as error:
        page = f"{constants.ENDPOINT}/{model}"
        raise ZftError(
            f"model={model} is gated: accept the licence at {page}, then `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ZftError(f"model={model} has no revision {revision!r}; name a branch, tag or commit it has") from error
    except errors.RepositoryNotFoundError as error:
        raise ZftError(
            f"model={model} is neither a folder here nor a model on the Hub; check the spelling, or, if it is private, "
            "`hf auth login` or set HF_TOKEN"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        reason = " ".join(str(error.__cause__ or error).split())[:120]
        raise ZftError(
            f"model={model} is not a folder here and the Hub cannot be reached ({reason}); check the network"
        ) from error
    except (errors.HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ZftError(f"model={model} could not be downloaded ({reason}); try again or give a local folder") from error
    if not any(each.suffix in (".safetensors", ".bin") for each in Path(folder).iterdir()):
        raise ZftError(
            f"model={model} has no safetensors weights; name another model, or set {ALLOW_PICKLE}=1 to accept pickles"
        )
    return Path(folder)


def cache_dir() -> Path:
    """Where converted models are kept: $XDG_CACHE_HOME/zft, else ~/.cache/zft."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zft"


def convert_gguf(path: Path) -> Path:
    """A bfloat16 safetensors folder made of a .gguf file, once; later calls find it in the cache. Raises ZftError."""
    from filelock import FileLock

    stat = path.stat()
    key = hashlib.sha256(f"1 {path} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]
    root = cache_dir() / "gguf"
    target = root / f"{path.stem}-{key}"
    if target.is_dir():
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ZftError(f"cannot write {root} ({error.strerror}); set XDG_CACHE_HOME to a writable folder") from error
    # one of several ranks converts, the others wait; a dead converter's lock is released by the kernel
    with FileLock(root / f"{target.name}.lock"):
        if not target.is_dir():
            log.info("converting %s once, into %s", path, target)
            _convert_apart(path, target)
    return target


def _convert_apart(path: Path, target: Path) -> None:
    """In a process of its own: the float32 weights that transformers needs for it are gone when it ends."""
    work = Path(tempfile.mkdtemp(prefix=f".tmp-{target.name}-", dir=target.parent))
    try:
        command = [sys.executable, "-c", "import sys; from zft.models.hub import write_gguf; write_gguf(*sys.argv[1:])"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["", *map(str, sys.path)]).strip(os.pathsep)}
        done = subprocess.run([*command, str(path), str(work)], capture_output=True, text=True, env=environment)
        if done.returncode != 0:
            reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
            raise ZftError(f"{path} cannot be converted ({reason[:200]}); give the model's safetensors folder instead")
        os.chmod(work, 0o777 & ~current_umask())
        os.rename(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def write_gguf(path: str, folder: str) -> None:
    """Dequantizes a .gguf into `folder` as bfloat16 safetensors with tokenizer and chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"gguf_file": Path(path).name}
    model: Any = AutoModelForCausalLM.from_pretrained(
        Path(path).parent, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **source
    )
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder, max_shard_size="5GB")
    AutoTokenizer.from_pretrained(Path(path).parent, **source).save_pretrained(folder)
    for each in Path(folder).iterdir():
        each.chmod(0o666 & ~current_umask())


def current_umask() -> int:
    """The process's umask, which can only be read by setting it."""
    value = os.umask(0o022)
    os.umask(value)
    return value
