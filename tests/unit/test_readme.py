"""The README's tree and figures are what the script makes of the files as they are."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def load():
    spec = importlib.util.spec_from_file_location("readme", ROOT / "scripts/readme.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_parts_are_current():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert load().filled(text) == text, "run python scripts/readme.py"


def test_every_module_says_what_it_is():
    module = load()
    silent = [line for line in module.tree().splitlines() if line.startswith(("zft/", "recipes/", "scripts/")) and line.count("  ") == 0]
    assert not silent, f"no first line in {silent}"


def test_a_new_file_makes_it_stale(tmp_path, monkeypatch):
    module = load()
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    monkeypatch.setattr(module, "tree", lambda: "```\nzft/ghost.py  not there\n```")
    assert module.filled(text) != text
