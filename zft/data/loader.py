"""Steps of micro-batches from tokenized sequences; its position is state.

(seed, epoch) → order of items → groups of one step → micro-batches → this rank's share → tensors
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from zft.config import ZftError
from zft.data.collate import packed, padded
from zft.data.order import epoch_order, group_by_length
from zft.data.pack import Items
from zft.data.store import Store

MicroBatch = dict[str, torch.Tensor]


@dataclass
class Epochs:
    """What every epoch draws from: items, grouped by source, and how to order them."""

    store: Store
    items: Items
    counts: list[int]  # items of each source
    weights: list[float] | None
    lengths: np.ndarray  # int64 [items], tokens
    targets: np.ndarray  # int64 [items], supervised tokens
    seed: int
    length_grouped: bool
    packed: bool
    padding_free: bool
    pad_id: int
    fingerprint: str

    def order(self, epoch: int) -> np.ndarray:
        """Item numbers of an epoch, int64 [items]."""
        order = epoch_order(self.counts, self.weights, self.seed, epoch)
        return group_by_length(order, self.lengths, self.seed, epoch) if self.length_grouped else order


class Loader:
    """Yields the micro-batches of this rank, one optimizer step at a time.

    A step takes micro_batch_size × grad_accum_steps × world items off the epoch's order. The last of an epoch takes
    what is left: ranks may then get fewer micro-batches, or none. The position counts items of the whole step, so it
    means the same at any world size.
    """

    def __init__(
        self, data: Epochs, rank: int, world: int, micro_batch_size: int, grad_accum_steps: int, epochs: float | None
    ) -> None:
        for name, value in (("micro_batch_size", micro_batch_size), ("grad_accum_steps", grad_accum_steps)):
            if value < 1:
                raise ZftError(f"train.{name} has to be at least 1, got {value}")
        if epochs is not None and not 0 < epochs < float("inf"):
            raise ZftError(f"train.epochs has to be a positive number, got {epochs}")
        self.data, self.rank, self.world = data, rank, world
        self.micro_batch_size = micro_batch_size
        self.step_items = micro_batch_size * grad_accum_steps * world
        self.steps_per_epoch = math.ceil(len(data.items) / self.step_items)
        self.end = None if epochs is None else max(1, round(epochs * len(data.items)))  # items to consume in all
        self.total_steps = None if epochs is None else self._steps(self.end)
        self.epoch, self.position = 0, 0  # position: items of the epoch consumed so far
        self.step_tokens = 0
        self._order: tuple[int, np.ndarray] | None = None

    def _steps(self, items: int) -> int:
        whole, rest = divmod(items, len(self.data.items))
        return whole * self.steps_per_epoch + math.ceil(rest / self.step_items)

    def next_step(self) -> list[MicroBatch] | None:
        """This rank's micro-batches of the next optimizer step, maybe none of them; None when the epochs are over.

        Sets `step_tokens` to the targets of the step over all ranks.
        """
        step = self.next_items()
        if step is None:
            return None
        size = self.micro_batch_size
        batches = [step[i : i + size] for i in range(0, len(step), size)]
        return [self._collate(batch) for batch in batches[self.rank :: self.world]]

    def next_items(self) -> np.ndarray | None:
        """The items of the next step over all ranks, int64; moves the position. None at the end."""
        if self.position >= len(self.data.items):
            self.epoch, self.position = self.epoch + 1, 0
        if self.end is not None and self.epoch * len(self.data.items) + self.position >= self.end:
            return None
        left = self.step_items if self.end is None else self.end - self.epoch * len(self.data.items) - self.position
        step = self._epoch_order()[self.position :][: min(left, self.step_items)]
        self.position += len(step)
        self.step_tokens = int(self.data.targets[step].sum())
        return step

    def _epoch_order(self) -> np.ndarray:
        if self._order is None or self._order[0] != self.epoch:
            self._order = (self.epoch, self.data.order(self.epoch))
        return self._order[1]

    def _collate(self, batch: np.ndarray) -> MicroBatch:
        data = self.data
        rows = [[(data.store.ids(s), data.store.mask(s)) for s in data.items[item]] for item in batch]
        if data.packed or data.padding_free:
            return packed(rows, data.pad_id, data.padding_free)
        return padded([row[0] for row in rows], data.pad_id)

    def state_dict(self) -> dict:
        """The position: plain numbers and strings, the same on every rank."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.data.seed,
            "items": len(self.data.items),
            "fingerprint": self.data.fingerprint,
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on at a saved position, at any world size. Raises ZftError when data, seed or packing have changed."""
        now = self.state_dict()
        for name, what in (("fingerprint", "data or data_options"), ("items", "data"), ("seed", "train.seed")):
            if state[name] != now[name]:
                raise ZftError(
                    f"{what} changed since the checkpoint (then {state[name]}, now {now[name]}); "
                    "resume with the same data and seed, or start a new run from its export"
                )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
