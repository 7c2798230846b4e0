"""The tokens that answers end with are found in the data and end generation by an exported model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.tiny import tiny_folder, tiny_model, tiny_tokenizer
from zft.checkpoint.hf import export_folder
from zft.data import prepare
from zft.models.load import build_model

STOP = 2  # <|im_end|>


def exported(folder: Path, base: Path, **options) -> tuple[dict, str]:
    """(generation_config.json, its text) of an export of a tiny model with other weights."""
    export_folder(
        folder, iter([dict(tiny_model("llama", seed=7).named_parameters())]), build_model(base), base, **options
    )
    text = (folder / "generation_config.json").read_text()
    return json.loads(text), text


@pytest.mark.parametrize("generation", [True, False], ids=["marked", "by prefix"])
def test_the_end_of_turn_is_found_with_a_line_break_behind_it(generation, tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    assert prepare(str(tmp_path / "a.jsonl"), tiny_tokenizer(64, generation), seq_len=64).stop_ids == [STOP]


def test_text_that_ends_without_a_special_token_has_none(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "a b", "completion": "c"}\n')
    tokenizer = tiny_tokenizer(64)
    tokenizer.eos_token = None
    assert prepare(str(tmp_path / "a.jsonl"), tokenizer, seq_len=64).stop_ids == []


@pytest.mark.parametrize(
    ("settings", "stop_ids", "expected"),
    [
        ({"eos_token_id": 3}, [STOP], [3, STOP]),
        ({"eos_token_id": [3, 4], "do_sample": True, "top_p": 0.9}, [4, STOP], [3, 4, STOP]),
        ({"max_length": 50}, [5], [STOP, 5]),  # config.json's own
        ({"max_length": 50}, [STOP], STOP),
        ({"eos_token_id": 3, "temperature": 0.5}, [STOP], [3, STOP]),  # invalid, so repaired
    ],
)
def test_they_join_the_base_s(settings, stop_ids, expected, tmp_path):
    base = tiny_folder("llama", tmp_path / "base")
    (base / "generation_config.json").write_text(json.dumps(settings | {"note": 1}))
    found, _ = exported(tmp_path / "out", base, stop_ids=stop_ids)
    assert found["eos_token_id"] == expected
    if "temperature" not in settings:
        assert found == settings | {"note": 1, "eos_token_id": expected}
    GenerationConfig.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "again")


def test_a_base_that_knows_them_is_copied_word_for_word(tmp_path):
    base = tiny_folder("llama", tmp_path / "base")
    text = '{"eos_token_id": [2, 3],    "note": 1}'
    (base / "generation_config.json").write_text(text)
    assert exported(tmp_path / "out", base, stop_ids=[3, STOP])[1] == text
    assert exported(tmp_path / "none", base)[1] == text


def test_a_base_without_the_file(tmp_path):
    base = tiny_folder("llama", tmp_path / "base")
    (base / "generation_config.json").unlink()
    assert exported(tmp_path / "out", base, stop_ids=[5])[0]["eos_token_id"] == [STOP, 5]


def test_generation_ends_there(tmp_path):
    base = tiny_folder("llama", tmp_path / "base")
    (base / "generation_config.json").write_text('{"eos_token_id": 1}')
    exported(tmp_path / "free", base)
    given, ends = torch.tensor([[5, 6, 7]]), {"max_new_tokens": 12, "do_sample": False}
    free = AutoModelForCausalLM.from_pretrained(tmp_path / "free").generate(given, **ends)[0, 3:].tolist()
    place = next(i for i, token in enumerate(free) if i > 1 and token not in free[:i])
    assert len(free) > place + 1, "without stop_ids it goes on"
    exported(tmp_path / "ended", base, stop_ids=[free[place]])
    ended = AutoModelForCausalLM.from_pretrained(tmp_path / "ended").generate(given, **ends)[0, 3:].tolist()
    assert ended == free[: place + 1]
