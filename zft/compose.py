"""From a recipe's name and key=value arguments to a RunConfig, by Hydra's Compose API."""

from __future__ import annotations

import ast
from pathlib import Path

from zft.config import RunConfig, ZftError
from zft.overrides import Override, literal, name_on_disk, parse, sources
from zft.schema import GROUPS, keys
from zft.tree import build, defaults, get, put, raise_all, read_yaml

_FIXED_ON_RESUME = ("model", "data", "out", "method", "optimizer", "experiment", "overwrite", "trust_remote_code")
_PACKAGE = Path(__file__).parent


def configs_folder() -> Path:
    """Folder of Hydra's groups: inside the installed package, or beside it in a checkout."""
    return _shipped("configs")


def recipes_folder() -> Path:
    return _shipped("recipes")


def _shipped(name: str) -> Path:
    inside = _PACKAGE / f"_{name}"
    return inside if inside.is_dir() else _PACKAGE.parent / name


def recipes() -> list[str]:
    return sorted(path.stem for path in recipes_folder().glob("*.py"))


def options(group: str) -> list[str]:
    """The names that `group=` accepts."""
    return sorted(path.stem for path in (configs_folder() / group).glob("*.yaml"))


def find_recipe(name: str, cwd: Path) -> Path:
    """A shipped recipe by its name, or a script by its path. Raises ZftError."""
    if name in recipes():
        return recipes_folder() / f"{name}.py"
    path = Path(cwd / name).absolute()
    if path.suffix == ".py" and path.is_file():
        return path
    raise ZftError(f"no recipe {name!r}; choose {', '.join(recipes())} or give the path of a script")


def compose(recipe: str, args: list[str], cwd: Path) -> RunConfig:
    """The resolved run. Raises ZftError with every problem of `args` in one line."""
    script = find_recipe(recipe, cwd)
    overrides, problems = parse(args, {group: options(group) for group in GROUPS})
    chosen, values = _values(overrides, cwd, problems)
    raise_all(problems)
    tree = _hydra(base_config(script), chosen)
    tree["recipe"] = recipe if recipe in recipes() else str(script)
    raise_all(_checked(tree, cwd))
    for key, value in values.items():
        put(tree, key, value)
    return build(tree, cwd)


def recompose(tree: dict, args: list[str], cwd: Path, free: tuple[str, ...] = ()) -> RunConfig:
    """A run folder's tree with `args` on top, for `zft resume`. free: keys that may change all the same. Raises ZftError."""
    overrides, problems = parse(args, {group: options(group) for group in GROUPS})
    fixed = [o for o in overrides if o.key.split(".")[0] in set(_FIXED_ON_RESUME) - set(free)]
    problems += [f"{o.key} can't change on resume, got {o.key}={o.text}; start a new run" for o in fixed]
    chosen, values = _values(overrides, cwd, problems)
    raise_all(problems)
    tree["train"]["stop_after"] = None
    for group in chosen:
        name, _, option = group.partition("=")
        tree[name].update(read_yaml(configs_folder() / name / f"{option}.yaml"))
    for key, value in values.items():
        put(tree, key, value)
    raise_all(_checked(tree, cwd))
    return build(tree, cwd)


def base_config(script: Path) -> str:
    """The config that a recipe starts from: its line `CONFIG = "sft"`, read without running it."""
    try:
        body = ast.parse(script.read_text(encoding="utf-8")).body
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ZftError(f"{script} is not a Python script: {error}") from error
    for node in body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "CONFIG":
            return ast.literal_eval(node.value)
    return "sft"


def _values(overrides: list[Override], cwd: Path, problems: list[str]) -> tuple[list[str], dict[str, object]]:
    """Group choices in Hydra's grammar, and the checked value of every other key. Adds to `problems`."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser, chosen, values = OverridesParser.create(), [], {}
    for override in overrides:
        if override.key in GROUPS:
            chosen.append(f"{override.key}={override.text}")
            continue
        key = keys()[override.key]
        try:
            if key.is_path or (key.type in (str, str | None) and not key.choices):
                values[key.name] = literal(key, override.text, cwd)
                continue
            parsed = parser.parse_override(f"key={override.text}")
            if parsed.is_sweep_override():
                raise ZftError(f"{key.name} must be {key.describe()}, got {override.text}")
            value = key.check(parsed.value(), override.text)
            merges = isinstance(value, dict) and isinstance(values.get(key.name), dict)
            values[key.name] = {**values[key.name], **value} if merges else value
        except ZftError as error:
            problems.append(str(error))
        except HydraException:
            problems.append(f"{key.name} must be {key.describe()}, got {override.text!r}, which can't be parsed")
    return chosen, values


def _hydra(name: str, overrides: list[str]) -> dict:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    ConfigStore.instance().store("schema", defaults())
    with initialize_config_dir(str(configs_folder()), version_base="1.3"):
        return OmegaConf.to_container(hydra_compose(name, overrides), resolve=True)


def _checked(tree: dict, cwd: Path) -> list[str]:
    """Problems in a composed tree, so that presets obey the same rules; converts values in place."""
    problems = []
    for section, content in tree.items():
        names = [f"{section}.{leaf}" for leaf in content] if isinstance(content, dict) else [section]
        groups = {f"{group}.name" for group in GROUPS}
        problems += [
            f"unknown key {n!r} in configs/" for n in names if n not in keys() and n not in groups | {"recipe"}
        ]
    for key in keys().values():
        value = get(tree, key.name)
        try:
            if key.name in ("data", "eval_data"):
                value = sources(value, key.name, cwd) if isinstance(value, str) else value
            elif key.name == "model":
                value = value and name_on_disk(value, "model", cwd)
            else:
                value = key.check(value, str(value))
        except ZftError as error:
            problems.append(str(error))
        put(tree, key.name, value)
    return problems
