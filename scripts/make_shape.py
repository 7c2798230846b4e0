"""Makes a model folder with random weights of a given shape, one shard in memory at a time.

    python scripts/make_shape.py 1b1 FOLDER [--layers 44]

Shapes: those of zft/plan/models.yaml by their alias (135m and 1b1 for short). bfloat16, safetensors, no tokenizer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[1]
SHORT = {"135m": "smollm2_135m", "1b1": "tinyllama_1b1"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    options = parser.parse_args()
    made = make(options.shape, options.folder, options.layers)
    print(f"{made:,} parameters in {options.folder}")
    return 0


def make(shape: str, folder: Path, layers: int | None = None, **changed) -> int:
    """Write the folder; returns its number of parameters. changed: other fields of the config. The values depend on the shape
    alone."""
    from transformers import AutoConfig

    rows = yaml.safe_load((ROOT / "zft" / "plan" / "models.yaml").read_text(encoding="utf-8"))
    found = [row for row in rows.values() if row["alias"] == SHORT.get(shape, shape)]
    if not found:
        sys.exit(f"no shape {shape!r}; choose {', '.join([*SHORT, *(row['alias'] for row in rows.values())])}")
    values = dict(found[0]["config"])
    values |= changed | ({"num_hidden_layers": layers} if layers else {})
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.dtype = "bfloat16"
    folder.mkdir(parents=True, exist_ok=True)
    names, total = {}, 0
    for number, tensors in enumerate(shards(config)):
        name = f"model-{number:05}.safetensors"
        save_file(tensors, str(folder / name), metadata={"format": "pt"})
        names |= dict.fromkeys(tensors, name)
        total += sum(tensor.numel() for tensor in tensors.values())
    index = {"metadata": {"total_size": 2 * total}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    # last: a folder without it is not a model
    config.save_pretrained(folder)
    return total


def shards(config) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of each module that has any, as transformers names them."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    tied = set(model.all_tied_weights_keys) if config.tie_word_embeddings else set()
    generator = torch.Generator().manual_seed(0)
    groups: dict[str, list[tuple[str, torch.Size]]] = {}
    for name, tensor in model.state_dict().items():
        if name not in tied:
            parts = name.split(".")
            number = next((i for i, part in enumerate(parts) if part.isdigit()), 1)
            groups.setdefault(".".join(parts[: number + 1]), []).append((name, tensor.shape))
    for members in groups.values():
        yield {name: _values(shape, generator) for name, shape in members}


def _values(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    if len(shape) < 2:
        return torch.ones(shape, dtype=torch.bfloat16)
    return (torch.randn(shape, generator=generator) * 0.02).to(torch.bfloat16)


if __name__ == "__main__":
    sys.exit(main())
