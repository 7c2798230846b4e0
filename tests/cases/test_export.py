"""Case k 88: the chat template. 87 and 90 have files of their own: tests/integration/test_export_fresh.py (custom code) and
tests/unit/test_push.py (uploads)."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from tests.tiny import CHATML, tiny_folder
from zft.api import AdamW, Engine, EngineConfig
from zft.models.load import load_tokenizer

CONFIG = EngineConfig(compute_device="cpu", optim=AdamW(lr=0.02))


def test_88_the_template_trained_with_comes_back(tmp_path: Path) -> None:
    base = tiny_folder("llama", tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    tokenizer = load_tokenizer(base)
    assert tokenizer.chat_template is None
    tokenizer.chat_template = CHATML
    with Engine.from_pretrained(base, CONFIG) as engine:
        engine.export(tmp_path / "set", tokenizer=tokenizer)
        engine.export(tmp_path / "given", tokenizer=load_tokenizer(base), chat_template=CHATML)
    for name in ("set", "given"):
        assert AutoTokenizer.from_pretrained(tmp_path / name).chat_template == CHATML
