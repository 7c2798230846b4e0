"""What `model=` may be, with a stand-in for the Hub on localhost."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.tiny import tiny_folder
from zft.config import ZftError
from zft.models import hub

COMMIT = "a" * 40
ANSWERS = {
    "org/gated": (403, "GatedRepo"),
    "org/gated-anonymous": (401, "GatedRepo"),
    "org/absent": (404, "RepoNotFound"),
    "org/private": (401, "RepoNotFound"),
    "org/broken": (418, ""),
}


class Standin(BaseHTTPRequestHandler):
    """Enough of the Hub's read API for snapshot_download: repository info, file metadata, file bytes."""

    repositories: dict[str, Path] = {}
    asked: list[str] = []

    def do_GET(self) -> None:
        self.answer(body=True)

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def answer(self, body: bool) -> None:
        type(self).asked.append(self.path)
        path = self.path.split("?")[0].removeprefix("/api/models").lstrip("/")
        for name, (status, code) in ANSWERS.items():
            if path.startswith(name):
                return self.reply(status, b"", {"X-Error-Code": code} if code else {}, body)
        repo = next((name for name in self.repositories if path.startswith(name)), None)
        if repo is None:
            return self.reply(404, b"", {"X-Error-Code": "RepoNotFound"}, body)
        folder = self.repositories[repo]
        if "/resolve/" in path:
            file = folder / path.split("/resolve/")[1].split("/", 1)[1]
            if not file.is_file():
                return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"}, body)
            return self.reply(200, file.read_bytes(), {"X-Repo-Commit": COMMIT, "ETag": f'"{file.name}"'}, body)
        if "/revision/no-such" in path:
            return self.reply(404, b"", {"X-Error-Code": "RevisionNotFound"}, body)
        names = [str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()]
        if "/tree/" in path:
            tree = [{"type": "file", "path": n, "size": (folder / n).stat().st_size, "oid": "b" * 40} for n in names]
            return self.reply(200, json.dumps(tree).encode(), {}, body)
        info = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
        return self.reply(200, json.dumps(info).encode(), {}, body)

    def reply(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Standin]]:
    from huggingface_hub import constants

    handler = type("Handler", (Standin,), {"repositories": {}, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "*")
    yield handler
    server.shutdown()
    server.server_close()


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert hub.resolve_model(str(tmp_path)) == tmp_path.resolve()


@pytest.mark.parametrize(
    "model", ["./missing", "/missing/model", "~/missing", "a/b/c", "missing.gguf", "C:\\models\\x"]
)
def test_a_missing_path_is_one_line_without_asking_the_hub(model: str, endpoint: type[Standin]) -> None:
    with pytest.raises(ZftError, match="does not exist") as caught:
        hub.resolve_model(model)
    assert model in str(caught.value) and "\n" not in str(caught.value) and not endpoint.asked


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(ZftError, match="is a file"):
        hub.resolve_model(str(tmp_path / "x.bin"))


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("org/gated", r"gated: accept the licence at http://127.*/org/gated, then `hf auth login` or set HF_TOKEN"),
        ("org/gated-anonymous", "gated: accept the licence"),
        ("org/absent", "neither a folder here nor a model on the Hub"),
        ("org/private", "if it is private, `hf auth login`"),
        ("org/broken", "418"),
        ("not a valid id!", "neither a folder, a .gguf file nor a valid Hub id"),
    ],
)
def test_refusals_of_the_hub_are_one_line(model: str, says: str, endpoint: type[Standin]) -> None:
    with pytest.raises(ZftError, match=says) as caught:
        hub.resolve_model(model)
    assert "\n" not in str(caught.value)


def test_an_unreachable_hub_is_one_line(endpoint: type[Standin], monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ZftError, match="the Hub cannot be reached"):
        hub.resolve_model("org/model")


def test_a_hub_model_is_downloaded_without_second_copies(endpoint: type[Standin], tmp_path: Path) -> None:
    source = tiny_folder("llama", tmp_path / "source", max_shard_size="30KB")
    for name in ("pytorch_model.bin", "consolidated.safetensors", "original/params.json", "README.md"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("x")
    endpoint.repositories["org/tiny"] = source
    folder = hub.resolve_model("org/tiny")
    got = {str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()}
    want = {each.name for each in source.iterdir() if each.is_file()} - {
        "pytorch_model.bin",
        "consolidated.safetensors",
    }
    assert got == want
    from zft.models.load import HubWeights, build_model

    assert HubWeights(folder, build_model(folder)).unexpected == []
    with pytest.raises(ZftError, match="no revision 'no-such'"):
        hub.resolve_model("org/tiny", revision="no-such")


def test_a_hub_model_with_pickles_only(endpoint: type[Standin], tmp_path: Path, monkeypatch) -> None:
    source = tiny_folder("llama", tmp_path / "source")
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    endpoint.repositories["org/old"] = source
    with pytest.raises(ZftError, match="no safetensors weights"):
        hub.resolve_model("org/old")
    monkeypatch.setenv("ZFT_ALLOW_PICKLE", "1")
    assert (hub.resolve_model("org/old") / "pytorch_model.bin").is_file()


def test_a_downloaded_model_is_found_offline(endpoint: type[Standin], tmp_path: Path, monkeypatch) -> None:
    from huggingface_hub import constants

    endpoint.repositories["org/tiny"] = tiny_folder("llama", tmp_path / "source")
    folder = hub.resolve_model("org/tiny")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert hub.resolve_model("org/tiny") == folder


@pytest.mark.parametrize(
    ("model", "hub_id"),
    [("org/name", True), ("gpt2", True), ("./x", False), ("a/b/c", False), ("x.gguf", False), ("a b", False)],
)
def test_is_hub_id(model: str, hub_id: bool) -> None:
    assert hub.is_hub_id(model) == hub_id


def test_a_broken_gguf_is_one_line_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "m.gguf").write_bytes(b"not a gguf")
    with pytest.raises(ZftError, match="cannot be converted") as caught:
        hub.resolve_model(str(tmp_path / "m.gguf"))
    assert "\n" not in str(caught.value)
    assert not [each for each in (tmp_path / "cache/zft/gguf").iterdir() if each.is_dir()]
