"""Every third-party package that zft or a recipe imports is named in pyproject.toml, not there by chance."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OWN = {"zft", "recipes"}


def plain(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def named(group: str | None = None) -> set[str]:
    """Distributions in the dependencies, or in the optional group."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    rows = project["dependencies"] if group is None else project["optional-dependencies"][group]
    return {plain(re.match(r"[A-Za-z0-9._-]+", row)[0]) for row in rows}


def imported(source: str) -> set[str]:
    """Top-level packages that a module imports anywhere, the standard library's left out."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - OWN


def unnamed(source: str, allowed: set[str]) -> set[str]:
    """Imports whose distribution is not allowed; a package that is not installed goes by its own name."""
    distributions = packages_distributions()
    return {name for name in imported(source) if not {plain(d) for d in distributions.get(name, [name])} & allowed}


@pytest.mark.parametrize("folder", ["zft", "recipes"])
def test_every_import_is_a_named_dependency(folder):
    allowed = named() | named("eval") | named("track")
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    missing = {str(path.relative_to(ROOT)): unnamed(path.read_text(encoding="utf-8"), allowed) for path in files}
    assert not {path: names for path, names in missing.items() if names}


def test_what_only_an_extra_names_is_not_imported_with_zft():
    """Such a package is imported in a function, at most."""
    for path in ROOT.glob("zft/**/*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not unnamed(ast.unparse(tree), named()), path


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import yaml, json\nfrom zft.config import ZftError", set()),  # PyYAML
        ("def f():\n    import pytest", {"pytest"}),
        ("from not_there.inside import x", {"not_there"}),
    ],
)
def test_a_missing_one_is_found(source, expected):
    assert unnamed(source, named()) == expected
