"""Renderings → token ids and masks, a batch at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zft.config import ZftError
from zft.data.chat import Rendering
from zft.data.mask import token_mask


@dataclass
class Encoded:
    """One row before it is cut: `ids` int32 [T], `mask` uint8 [T] (1: target)."""

    ids: np.ndarray
    mask: np.ndarray
    where: str
    document: bool
    across: int  # targets' first tokens that also hold prompt text
    ended: bool  # an end of turn was there (True) or had to be appended (False)


class Encoder:
    """Tokenizes with one tokenizer. Chat text carries its special tokens already: none is added a second time."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer
        self.eos = tokenizer.eos_token_id
        self.bos_token = tokenizer.bos_token
        self.bos = tokenizer.bos_token_id
        self.adds_bos = self.bos is not None and tokenizer("a")["input_ids"][:1] == [self.bos]

    def encode(self, batch: list[Rendering], ended: list[bool]) -> list[Encoded]:
        """`ended[i]`: whether rendering i has an end-of-turn token as its last target; if not, EOS is appended."""
        offsets = self._tokenize([rendering.text for rendering in batch])
        out = []
        for rendering, (ids, table), done in zip(batch, offsets, ended, strict=True):
            mask, across = token_mask(table, rendering.spans)
            append = not done and rendering.ends and bool(rendering.spans) and self.eos is not None
            if append and rendering.spans[-1][1] < len(rendering.text.rstrip()):
                append = False  # text follows the last target, so the row's end isn't the turn's
            if append and len(ids) and ids[-1] == self.eos:
                append = False
            if append:
                ids, mask = np.append(ids, np.int32(self.eos)), np.append(mask, np.uint8(1))
            if rendering.plain and rendering.begins and self.adds_bos and not (len(ids) and ids[0] == self.bos):
                ids, mask = np.insert(ids, 0, self.bos), np.insert(mask, 0, np.uint8(0))
            out.append(Encoded(ids, mask, rendering.where, rendering.document, across, not append or rendering.plain))
        return out

    def _tokenize(self, texts: list[str]) -> list[tuple[np.ndarray, list[tuple[int, int]]]]:
        if not self.tokenizer.is_fast:
            raise ZftError(
                f"{type(self.tokenizer).__name__} gives no character offsets, which the masks need; "
                "use the fast tokenizer (tokenizer.json) of this model"
            )
        done = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False)
        return [
            (np.asarray(ids, dtype=np.int32), table)
            for ids, table in zip(done["input_ids"], done["offset_mapping"], strict=True)
        ]
