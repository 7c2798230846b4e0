"""Uploading an export to the Hub: checked locally first; what has arrived is not sent again by the next attempt."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from zft.checkpoint.card import is_repo_id
from zft.checkpoint.names import ExportError
from zft.checkpoint.verify import verify_export
from zft.config import ZftError
from zft.models.tensorfile import TensorFile

ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


class PushError(Exception):
    """An upload that did not finish; the message has the command that continues it."""


def push(folder: str | Path, repo_id: str, private: bool = False, trust_remote_code: bool = False) -> str:
    """Creates `repo_id` if need be and uploads every file of an export or adapter folder. Returns the repository's URL.

    Raises ZftError for a folder that is not complete, a bad name or no login, PushError (with the retry command) when
    the network or the Hub fails. huggingface_hub skips files that are there already, so repeating the call resumes.
    """
    folder = Path(folder)
    if not is_repo_id(repo_id):
        raise ZftError(f"{repo_id!r} is not a Hub repository name; give USER/NAME (letters, digits, -, _ and .)")
    check_complete(folder, trust_remote_code)
    return _upload(folder, repo_id, private)


def check_complete(folder: Path, trust_remote_code: bool = False) -> None:
    """Raises ZftError unless the folder is a model or an adapter that loads."""
    if not folder.is_dir():
        raise ZftError(f"{folder} is not a folder; give an export of zft")
    if (folder / ADAPTER[0]).is_file():
        if not (folder / ADAPTER[1]).is_file():
            raise ZftError(f"{folder} lacks {ADAPTER[1]}; export the adapter again")
        TensorFile(folder / ADAPTER[1]).close()
        return
    try:
        verify_export(folder, trust_remote_code=trust_remote_code)
    except ExportError as error:
        raise ZftError(f"{folder} is not complete, nothing was uploaded: {error}") from error


def _upload(folder: Path, repo_id: str, private: bool) -> str:
    from huggingface_hub import HfApi, errors

    api: Any = HfApi()
    try:
        url = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=url.repo_id, folder_path=folder, commit_message="Upload with zft", ignore_patterns=[".*", "**/.*"]
        )
        return str(url)
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status == 401 or isinstance(error, errors.LocalTokenNotFoundError):
            raise ZftError(
                "the Hub does not know you: `hf auth login` or set HF_TOKEN (a token that may write)"
            ) from error
        if status == 403 and str(error.response.url).endswith("/api/repos/create"):
            raise ZftError(f"your token may not write to {repo_id}; give another name or a token that may") from error
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        again = retry_command(folder, repo_id, private)
        raise PushError(f"upload to {repo_id} did not finish ({reason}); continue with: {again}") from error


def retry_command(folder: Path, repo_id: str, private: bool) -> str:
    """The command line that repeats the upload."""
    return shlex.join(["zft", "push", str(folder), repo_id, *(["--private"] if private else [])])
