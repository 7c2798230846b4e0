"""Uploads against a stand-in for the Hub's HTTP API on localhost."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.tiny import tiny_folder
from zft.checkpoint.push import PushError, check_complete, push, retry_command
from zft.config import ZftError


class Hub(BaseHTTPRequestHandler):
    """create repo, preupload, LFS batch and PUT, commit. State is on the class that the fixture makes."""

    objects: dict[str, bytes]
    committed: dict[str, bytes]
    puts: list[str]
    created: list[dict]
    fail_puts: int
    token: str

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {self.token}":
            return self.reply(401, {"error": "Invalid credentials"})
        path = self.path.split("?")[0]
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return self.reply(200, {"url": f"{self.root()}/me/model", "id": "me/model"})
        if path == "/api/validate-yaml":
            return self.reply(200, {"errors": [], "warnings": []})
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            modes = {f["path"]: "lfs" if f["path"].endswith(".safetensors") else "regular" for f in files}
            kinds = [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes.items()]
            return self.reply(200, {"files": kinds, "commitOid": "a" * 40})
        if path.endswith("/info/lfs/objects/batch"):
            wanted = json.loads(body)["objects"]
            return self.reply(200, {"transfer": "basic", "objects": [self.lfs(each) for each in wanted]})
        if "/commit/" in path:
            return self.commit(body)
        return self.reply(404, {"error": path})

    def lfs(self, wanted: dict) -> dict:
        known = wanted["oid"] in self.objects
        upload = {"upload": {"href": f"{self.root()}/put/{wanted['oid']}"}}
        return wanted | ({} if known else {"actions": upload})

    def commit(self, body: bytes) -> None:
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                self.committed[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                self.committed[value["path"]] = self.objects[value["oid"]]
        url = f"{self.root()}/me/model/commit/{'b' * 40}"
        self.reply(200, {"success": True, "commitOid": "b" * 40, "commitUrl": url})

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        type(self).puts.append(self.path)
        if self.fail_puts and len(self.puts) == self.fail_puts:
            return self.reply(403, {"error": "storage says no"})
        oid = self.path.rsplit("/", 1)[1]
        assert hashlib.sha256(body).hexdigest() == oid
        self.objects[oid] = body
        return self.reply(200, {})

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/me/model"):
            return self.reply(200, {"id": "me/model", "sha": "a" * 40, "siblings": []})
        return self.reply(404, {"error": self.path})

    do_HEAD = do_GET

    def root(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def reply(self, status: int, answer: dict) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    from huggingface_hub import constants

    state = {"objects": {}, "committed": {}, "puts": [], "created": [], "fail_puts": 0, "token": "hf_right"}
    handler = type("Handler", (Hub,), state)
    running = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{running.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    monkeypatch.setenv("NO_PROXY", "*")
    yield handler
    running.shutdown()
    running.server_close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    out = tiny_folder("llama", tmp_path / "export dir", max_shard_size="16KB")
    (out / "README.md").write_text("# card\n")
    (out / ".hidden").write_text("not mine to give")
    return out


def visible(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in folder.iterdir() if not each.name.startswith(".")}


def test_every_file_arrives(server: type[Hub], folder: Path) -> None:
    url = push(folder, "me/model", private=True)
    assert url.endswith("/me/model") and server.committed == visible(folder)
    assert server.created[0].get("private") is True or server.created[0].get("visibility") == "private"


def test_a_failed_upload_says_how_to_continue_and_the_next_one_sends_the_rest(server: type[Hub], folder: Path) -> None:
    shards = len(list(folder.glob("*.safetensors")))
    assert shards >= 3
    server.fail_puts = 2
    with pytest.raises(PushError, match="did not finish") as caught:
        push(folder, "me/model")
    assert str(caught.value).endswith(f"continue with: zft push '{folder}' me/model") and not server.committed
    there = len(server.objects)
    server.puts.clear()
    server.fail_puts = 0
    push(folder, "me/model")
    assert server.committed == visible(folder) and len(server.puts) == shards - there < shards


def test_an_incomplete_folder_is_not_uploaded(server: type[Hub], folder: Path) -> None:
    next(folder.glob("*.safetensors")).unlink()
    with pytest.raises(ZftError, match="not complete, nothing was uploaded"):
        push(folder, "me/model")
    assert not server.created


def test_no_login_and_bad_names_are_one_line(server: type[Hub], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(ZftError, match="`hf auth login` or set HF_TOKEN"):
        push(folder, "me/model")
    for name in ("model", "me/my model", "a/b/c", str(folder)):
        with pytest.raises(ZftError, match="not a Hub repository name"):
            push(folder, name)
    with pytest.raises(ZftError, match="is not a folder"):
        push(folder / "nothing", "me/model")


def test_an_adapter_folder_is_complete_with_both_files(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ZftError, match="lacks adapter_model.safetensors"):
        check_complete(tmp_path)
    save_file({"a": torch.zeros(2)}, tmp_path / "adapter_model.safetensors")
    check_complete(tmp_path)


def test_retry_command_quotes() -> None:
    assert retry_command(Path("my runs/export"), "me/x", True) == "zft push 'my runs/export' me/x --private"
