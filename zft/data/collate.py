"""Sequences → one micro-batch of tensors.

[Note: keeping packed documents apart] Packed micro-batches carry `position_ids` that restart at 0 with each document
and no `attention_mask`: that is how transformers (masking_utils.find_packed_sequence_indices) tells documents and builds
a block mask for eager, sdpa and flex attention. Flash attention reads the same position_ids, but of a single row only:
`flat` lays the rows out one after the other. Padding is a document of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

IGNORE = -100


def padded(rows: Sequence[tuple[np.ndarray, np.ndarray]], pad_id: int) -> dict[str, torch.Tensor]:
    """Rows of (ids [t], mask [t]) → input_ids, labels, attention_mask, int64 [B, T], padded on the right.

    Labels follow the mask and the length, never the token id: a pad token that is also the EOS stays a target.
    """
    width = max(len(ids) for ids, _ in rows)
    input_ids = np.full((len(rows), width), pad_id, np.int64)
    labels = np.full((len(rows), width), IGNORE, np.int64)
    attention = np.zeros((len(rows), width), np.int64)
    for row, (ids, mask) in enumerate(rows):
        input_ids[row, : len(ids)] = ids
        labels[row, : len(ids)] = np.where(mask, ids, IGNORE)
        attention[row, : len(ids)] = 1
    return _tensors(input_ids=input_ids, labels=labels, attention_mask=attention)


def packed(rows: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]], pad_id: int, flat: bool) -> dict[str, torch.Tensor]:
    """Rows of documents → input_ids, labels, position_ids, int64 [B, T] ([1, total] when `flat`).

    See [Note: keeping packed documents apart].
    """
    if flat:
        rows = [[document for row in rows for document in row]]
    width = max(sum(len(ids) for ids, _ in row) for row in rows)
    input_ids = np.full((len(rows), width), pad_id, np.int64)
    labels = np.full((len(rows), width), IGNORE, np.int64)
    positions = np.zeros((len(rows), width), np.int64)
    for number, row in enumerate(rows):
        at = 0
        for ids, mask in row:
            end = at + len(ids)
            input_ids[number, at:end] = ids
            labels[number, at:end] = np.where(mask, ids, IGNORE)
            positions[number, at:end] = np.arange(len(ids))
            at = end
        positions[number, at:] = np.arange(width - at)
    return _tensors(input_ids=input_ids, labels=labels, position_ids=positions)


def _tensors(**arrays: np.ndarray) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
