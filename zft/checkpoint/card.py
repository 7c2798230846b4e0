"""The model card of an export: metadata that the Hub accepts, and the facts of the training."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?$")

BODY = """# {title}

{intro}

```python
{load}.from_pretrained("{title}")
tokenizer = AutoTokenizer.from_pretrained("{title}")
```

## Training

| | |
|---|---|
{rows}
"""
LOADERS = {
    "transformers": "from transformers import AutoModelForCausalLM, AutoTokenizer\n\nmodel = AutoModelForCausalLM",
    "peft": "from peft import AutoPeftModelForCausalLM\nfrom transformers import AutoTokenizer\n\n"
    "model = AutoPeftModelForCausalLM",
}


def write_card(
    folder: Path,
    base: Path | None,
    measured: dict[str, Any],
    facts: dict[str, Any] | None,
    library: str = "transformers",
) -> None:
    """README.md with library_name, pipeline_tag, base_model, datasets, license.

    facts: `base_model` (a Hub id; paths are left out of the metadata), `datasets` (Hub ids), `license`, `title`; every
    other entry is listed. The licence is the base card's unless given. `measured` (dtype, parameters) is listed too.
    library: transformers, or peft for an adapter.
    """
    from huggingface_hub import ModelCard, ModelCardData, constants

    facts = dict(facts or {})
    origin = str(facts.pop("base_model", "") or "")
    datasets = [str(each) for each in _listed(facts.pop("datasets", None))]
    title = str(facts.pop("title", "") or (f"{origin.rsplit('/', 1)[-1]}-zft" if origin else "model"))
    given = facts.pop("license", None)
    data = ModelCardData(
        library_name=library,
        pipeline_tag="text-generation",
        base_model=origin if is_repo_id(origin) else None,
        datasets=[each for each in datasets if is_repo_id(each)] or None,
        license=given or base_metadata(base).get("license"),
        language=base_metadata(base).get("language"),
        tags=["zft"],
    )
    for key in ("license_name", "license_link"):
        if given is None and (value := base_metadata(base).get(key)) is not None:
            setattr(data, key, value)
    started = (
        f"[{origin}]({constants.ENDPOINT}/{origin})" if is_repo_id(origin) else (Path(origin).name or "a local model")
    )
    rows = {"base model": started, "data": ", ".join(Path(each).name for each in datasets), **facts, **measured}
    table = "\n".join(
        f"| {key.replace('_', ' ')} | {_cell(value)} |" for key, value in rows.items() if value not in (None, "")
    )
    intro = f"Fine-tuned from {started} with zft."
    body = BODY.format(title=title, intro=intro, rows=table, load=LOADERS[library])
    content = f"---\n{data.to_yaml()}\n---\n\n{body}"
    (folder / "README.md").write_text(str(ModelCard(content)), encoding="utf-8")


def is_repo_id(name: str) -> bool:
    """Whether the Hub would accept `name` as a repository (and it is not a path here)."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    if not HUB_ID.match(name) or "/" not in name or Path(name).exists():
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def base_metadata(base: Path | None) -> dict[str, Any]:
    """Metadata block of the base's own card; empty if it has none that can be read."""
    from huggingface_hub.repocard import metadata_load

    if base is None or not (base / "README.md").is_file():
        return {}
    try:
        return metadata_load(base / "README.md") or {}
    except Exception:  # a card that another tool wrote badly must not fail an export
        return {}


def _listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, (list, tuple)) else [value]


def _cell(value: Any) -> str:
    text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
