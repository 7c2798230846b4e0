"""Fills the README's generated parts: the tree from the files' own first lines, the figures from scripts/results.

python scripts/readme.py            write
python scripts/readme.py --check    exit 1 if the README is not what this would write
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("zft", "recipes", "scripts")


def tree() -> str:
    """One line per Python file and script, in import order of the folders."""
    rows = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            name = path.relative_to(ROOT)
            if path.suffix in (".py", ".sh") and "__pycache__" not in path.parts and path.name != "__init__.py":
                rows.append((name.as_posix(), summary(path)))
    width = max(len(name) for name, _ in rows)
    return "```\n" + "\n".join(f"{name:<{width}}  {text}" for name, text in rows) + "\n```"


def summary(path: Path) -> str:
    """The first sentence of a file's docstring or header comment."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    else:
        text = "\n".join(line.lstrip("# ") for line in text.splitlines()[1:3])
    first = " ".join(text.split("\n\n")[0].split())
    sentence = re.split(r"(?<=\.)\s", first)[0].rstrip(".")
    return sentence if len(sentence) <= 96 else sentence[:93].rsplit(" ", 1)[0] + " …"


def figures() -> str:
    """The tables that the benchmark and parity scripts left in scripts/results."""
    parts = [
        path.read_text(encoding="utf-8").strip() for path in sorted((ROOT / "scripts/results").glob("readme-*.md"))
    ]
    return "\n\n".join(parts) if parts else "No benchmark has been recorded yet: `python scripts/bench.py` makes one."


def filled(readme: str) -> str:
    for name, make in (("tree", tree), ("figures", figures)):
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.S)
        readme = pattern.sub(lambda match, make=make: f"{match[1]}{make()}\n{match[2]}", readme)
    return readme


def main() -> int:
    path = ROOT / "README.md"
    old = path.read_text(encoding="utf-8")
    new = filled(old)
    if "--check" in sys.argv:
        return int(old != new)
    path.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
