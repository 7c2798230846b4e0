"""Makes tests/cases/README.md from the tests: for each reported fault its kind, what zft does, and the test.

    python scripts/cases_table.py            write
    python scripts/cases_table.py --check    exit 1 if the file is not what this would write, or a case has no test

Reads the tests' text only (file test_KIND_name.py, function test_NUMBER_name, first line of its docstring).
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "cases"
KINDS = {
    "a": ("loss, padding, masked labels", (1, 3, 4, 5, 6, 7, 8)),
    "b": ("tied embeddings", (10, 11, 12, 14, 15)),
    "c": ("vocabulary, pad token", (16, 17, 18, 20)),
    "d": ("LoRA", (22, 23, 24, 25, 27, 28, 29, 30, 31, 32)),
    "e": ("checkpoints and resume", (33, 34, 36, 37, 38, 40, 41, 42, 44, 46)),
    "f": ("mixed precision", (47, 49, 50, 51, 53)),
    "g": ("ZeRO-3", (54, 56, 57, 58, 60)),
    "h": ("offload", (62, 63, 65, 66, 67)),
    "i": ("data", (68, 69, 71, 72, 74, 75, 76, 78, 79)),
    "j": ("CLI and configuration", (80, 81, 84, 85)),
    "k": ("export", (87, 88, 90)),
}
"""Letter -> (name, numbers of its cases). The numbering has gaps; there are 67 cases."""

HEAD = """# Reported faults, as tests

67 faults that people reported of fine-tuning tools, each restated as the smallest input that provokes it. A test is
named by its case's number; it also tries neighbours of the input that nobody has reported.
`scripts/cases_table.py` makes this file.

| case | kind | what zft does | test |
|---:|---|---|---|
"""


@dataclass(frozen=True)
class CaseTest:
    """One test function of a case."""

    number: int
    kind: str
    does: str
    place: str


def cases() -> set[int]:
    return {number for _, numbers in KINDS.values() for number in numbers}


def found(folder: Path) -> list[CaseTest]:
    """Every test of a case, by number and then as the file has them."""
    tests = []
    for path in sorted(folder.glob("test_*.py")):
        kind = re.match(r"test_([a-k])_", path.name)
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            number = re.match(r"test_(\d\d)_", node.name) if isinstance(node, ast.FunctionDef) else None
            if kind and number:
                text = (ast.get_docstring(node) or "").strip().split("\n")[0]
                tests.append(CaseTest(int(number[1]), kind[1], text, f"{path.name}::{node.name}"))
    return sorted(tests, key=lambda test: test.number)


def problems(tests: list[CaseTest]) -> list[str]:
    """What the table would lack or have wrong, one line each."""
    missing = sorted(cases() - {test.number for test in tests})
    lines = [f"case {number} has no test" for number in missing]
    for test in tests:
        if test.number not in KINDS[test.kind][1]:
            lines.append(f"{test.place}: {test.number} is no case of kind {test.kind}")
        if not test.does:
            lines.append(f"{test.place} does not say what zft does")
    return lines


def table(tests: list[CaseTest]) -> str:
    rows = []
    for test in tests:
        does = test.does.replace("|", "\\|")
        rows.append(f"| {test.number} | {test.kind}: {KINDS[test.kind][0]} | {does} | `{test.place}` |\n")
    return HEAD + "".join(rows)


def main() -> int:
    tests, path = found(FOLDER), FOLDER / "README.md"
    if "--check" not in sys.argv:
        path.write_text(table(tests), encoding="utf-8")
        return 0
    lines = problems(tests)
    if not path.is_file() or path.read_text(encoding="utf-8") != table(tests):
        lines.append("tests/cases/README.md is stale; run python scripts/cases_table.py")
    print("\n".join(lines), end="\n" if lines else "")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
