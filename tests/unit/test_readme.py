"""The README's tree names files that are there, each with a line of its own."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def load():
    spec = importlib.util.spec_from_file_location("readme", ROOT / "scripts/readme.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tree_rows(text: str) -> list[list[str]]:
    block = text.split("<!-- tree -->")[1].split("<!-- /tree -->")[0]
    return [line.split(maxsplit=1) for line in block.splitlines() if "/" in line]


def test_the_tree_names_files_that_exist():
    rows = tree_rows((ROOT / "README.md").read_text(encoding="utf-8"))
    assert len(rows) > 50
    assert not [path for path, *_ in rows if not (ROOT / path).is_file()]
    assert not [path for path, *text in rows if not text], "a file without a first line"


def test_generated_parts_are_replaced():
    module = load()
    module.tree = lambda: "```\nzft/ghost.py  not there\n```"
    text = module.filled((ROOT / "README.md").read_text(encoding="utf-8"))
    assert tree_rows(text) == [["zft/ghost.py", "not there"]]
