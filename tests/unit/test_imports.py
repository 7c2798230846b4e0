"""Imports go down only (DESIGN section 2): read off the syntax trees, so that imports inside functions count too."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEVELS = [
    {"__main__"},
    {"recipes", "cli", "worker"},
    {"commands"},
    {"execute"},
    {"launch"},
    {"train"},
    {"plan"},
    {"api", "zft"},
    {"checkpoint", "models", "data"},
    {"engine"},
    {"optim", "tiers"},
    {"dist"},
    {"precision"},
    {"observe"},
    {"compose"},
    {"overrides"},
    {"tree"},
    {"schema"},
    {"status"},
    {"config"},
]
"""From the top. A part may import parts below it, and its own files."""
OBSERVE_MAY_IMPORT = {"config", "observe"}
ENGINE_MUST_NOT_IMPORT = {"transformers", "datasets", "peft"}


def part_of(module: str) -> str:
    """`zft.engine.tape` → engine; `zft` → zft; `recipes.sft` → recipes."""
    names = module.split(".")
    return names[1] if names[0] == "zft" and len(names) > 1 else names[0]


def imports(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used"
            found += [f"{node.module}.{a.name}" if node.module == "zft" else node.module for a in node.names]
    return found


def violations(module: str, source: str) -> list[str]:
    """One line for each import of `module` that goes up, sideways out of its part, or where it must not."""
    level = {part: place for place, parts in enumerate(LEVELS) for part in parts}
    part, problems = part_of(module), []
    if part not in level:
        return [f"{module}: no level for {part!r}; add it to LEVELS"]
    for name in imports(source):
        if part == "engine" and name.split(".")[0] in ENGINE_MUST_NOT_IMPORT:
            problems.append(f"{module} imports {name}")
        if name.split(".")[0] not in ("zft", "recipes"):
            continue
        target = part_of(name)
        if target not in level:
            # `from zft import Engine`: a name of the package itself
            target = "zft"
        if part == "zft":
            continue
        if part == "observe" and target not in OBSERVE_MAY_IMPORT:
            problems.append(f"{module} imports {name}, and observe imports config only")
        if target != part and level[target] <= level[part] and not _is_sibling(part, target):
            problems.append(f"{module} imports {name}, which is not below it")
    return problems


def _is_sibling(part: str, target: str) -> bool:
    """checkpoint uses models' names of weights; the other parts of a level stand alone."""
    return (part, target) in {("checkpoint", "models")}


def modules() -> list[tuple[str, Path]]:
    found = [(str(path.relative_to(ROOT).with_suffix("")).replace("/", "."), path) for path in ROOT.glob("zft/**/*.py")]
    found += [(f"recipes.{path.stem}", path) for path in ROOT.glob("recipes/*.py")]
    return [(name.removesuffix(".__init__"), path) for name, path in sorted(found)]


def test_imports_go_down():
    problems = [line for name, path in modules() for line in violations(name, path.read_text(encoding="utf-8"))]
    assert not problems, "\n".join(problems)


def test_every_file_is_seen():
    names = {name for name, _ in modules()}
    assert {"zft.cli", "zft.commands.run", "zft.config", "recipes.sft"} <= names


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("zft.engine.tape", "from zft.models.load import build_model"),
        ("zft.engine.tape", "def f():\n    import transformers"),
        ("zft.config", "from zft.schema import keys"),
        ("zft.tiers.cpu", "def f():\n    from zft.engine.unit import Unit"),
        ("zft.observe.metrics", "from zft.dist import World"),
        ("zft.train.loop", "import recipes.sft"),
        ("zft.data.read", "from zft.models.load import load_tokenizer"),
        ("zft.engine.step", "from zft import Engine"),
        ("zft.newpart.x", ""),
    ],
)
def test_an_upward_edge_is_found(module, source):
    assert violations(module, source)


def test_downward_edges_are_fine():
    source = (
        "import torch\nfrom zft.config import ZftError\nfrom zft.optim.rules import x\nfrom zft.engine.unit import Unit"
    )
    assert not violations("zft.engine.tape", source)
