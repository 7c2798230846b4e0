"""Ranks, their groups and the few collectives of the engine: torch.distributed only (gloo on CPU, NCCL on GPU).

Two kinds of group. Payload groups carry tensors on the compute device. The control group (always gloo) carries a few
integers between the hosts, so that agreeing on an order or an error never synchronises a GPU. A second world, `ahead`, has
groups of its own: on them the fetch thread gathers the next unit's weights while this one's collectives go on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from zft.config import ZftError

ROW_INTS = 32
"""Every agreement is made of rows of this many integers, so that a rank that fails can answer whichever comes next."""
_WELL, _FAILED = 0, 1
# torch 2.13 renamed them, and warns of the older names
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class RankError(RuntimeError):
    """Another rank raised, died or took another path; raised on every rank that is still there."""


class RankInputError(RankError, ZftError):
    """Another rank found the user's input wrong; the text is what it says."""


@dataclass(frozen=True)
class Mesh:
    """A replicate x shard mesh: `shard` ranks hold one copy together, `replicate` copies see different data."""

    shard: int
    replicate: int
    shard_rank: int
    shard_group: object
    replicate_group: object


class World:
    """This rank among all ranks: rank, size, device and mesh, and collectives that no-op on one rank."""

    def __init__(
        self, rank: int, size: int, device: torch.device, mesh: Mesh, control: object = None, ahead: World | None = None
    ):
        self.rank, self.size, self.device, self.mesh, self.control = rank, size, device, mesh, control
        self.ahead = ahead or self
        """The same ranks on groups of their own, for one other thread."""
        self.out_of_contact = False
        """Has a collective failed? Then the other ranks are not where this one is, and nothing can be agreed on."""

    @staticmethod
    def single(device: str | torch.device | None = None) -> World:
        """One rank, no process group."""
        return World(0, 1, _device(device, 0), Mesh(1, 1, 0, None, None))

    @staticmethod
    def from_env(device: str | None = None, shard_ranks: int | None = None, timeout_s: float = 600.0) -> World:
        """The world that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe; one rank where they are not set.

        Raises ZftError if `shard_ranks` does not divide the number of ranks.
        """
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1 and not dist.is_initialized():
            return World.single(device)
        rank, timeout = int(os.environ.get("RANK", "0")), timedelta(seconds=timeout_s)
        where = _device(device, int(os.environ.get("LOCAL_RANK", "0")))
        if where.type == "cuda":
            torch.cuda.set_device(where)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if where.type == "cuda" else "gloo", timeout=timeout)
        rank, size = dist.get_rank(), dist.get_world_size()

        def made(everyone: object, ahead: World | None) -> World:
            control = dist.new_group(backend="gloo", timeout=timeout)
            return World(rank, size, where, _mesh(rank, size, shard_ranks, everyone, timeout), control, ahead)

        return made(dist.group.WORLD, made(dist.new_group(timeout=timeout), None))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather_shards(self, full: torch.Tensor, shard: torch.Tensor) -> None:
        """full [shard_ranks * n] <- every shard [n] of this copy, in rank order."""
        if self.mesh.shard == 1:
            if full.data_ptr() != shard.data_ptr():
                full.copy_(shard)
            return
        with self._in_contact():
            _all_gather(_bytes(full), _bytes(shard), group=self.mesh.shard_group)

    def reduce_shards(self, full: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of this rank's slice of full [shard_ranks * n] -> [n]. `full` is scratch afterwards."""
        mesh = self.mesh
        shard = full
        if mesh.shard > 1:
            count = full.numel() // mesh.shard
            shard = torch.empty(count, dtype=full.dtype, device=full.device)
            with self._in_contact():
                _reduce_scatter(shard, full, group=mesh.shard_group)
        if mesh.replicate > 1:
            with self._in_contact():
                dist.all_reduce(shard, group=mesh.replicate_group)
        return shard

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place, on the compute device's group."""
        if self.size > 1:
            with self._in_contact():
                dist.all_reduce(tensor)
        return tensor

    def sum_over_shards(self, values: list[float]) -> list[float]:
        """float64 sums over the ranks of one copy, added in rank order so that every rank gets the same bits."""
        rows = self.gather_floats(values)[: self.mesh.shard]
        return [sum(column) for column in zip(*rows, strict=True)]

    def gather_floats(self, values: list[float]) -> list[list[float]]:
        """Every rank's list of floats (equal lengths), in rank order."""
        bits = torch.tensor(values, dtype=torch.float64).view(torch.int64).tolist()
        return [torch.tensor(row, dtype=torch.int64).view(torch.float64).tolist() for row in self.gather_ints(bits)]

    def gather_ints(self, values: list[int]) -> list[list[int]]:
        """Every rank's list of integers (equal lengths), in rank order. Raises RankError where a rank has failed."""
        if self.size == 1:
            return [list(values)]
        rows: list[list[int]] = [[] for _ in range(self.size)]
        for start in range(0, max(len(values), 1), ROW_INTS - 1):
            part = values[start : start + ROW_INTS - 1]
            for rank, row in enumerate(self._exchange([_WELL, *part])):
                rows[rank].extend(row[1 : 1 + len(part)])
        return rows

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks, in whichever agreement they are, what this one has raised."""
        if self.size == 1 or isinstance(error, RankError):
            return  # they know already
        error.is_told = True
        self.refuse(error)

    def refuse(self, error: BaseException) -> None:
        """Answer the agreement that the other ranks are in, or come to, with `error`."""
        with suppress(RankError):  # out of contact, or another has failed as well: they know as much
            self._exchange([_FAILED], error)

    def fail_once(self, error: BaseException) -> None:
        """`fail`, unless that was done on the way here."""
        if not getattr(error, "is_told", False):
            self.fail(error)

    def broadcast_object(self, value):
        """Rank 0's value on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def barrier(self) -> None:
        if self.size > 1:
            self.gather_ints([0])

    def agree(self, error: BaseException | None = None) -> None:
        """Meet the other ranks; raise on all of them when one brings an error (its own on the rank that has it)."""
        if error is not None:
            self.fail_once(error)
            raise error
        self.gather_ints([0])

    def agree_on(self, number: int, what: str, error: BaseException | None = None) -> None:
        """As `agree`, and raise on all of them where a rank comes with another number: they are not at the same place."""
        if error is not None:
            self.agree(error)
        found = [row[0] for row in self.gather_ints([number])]
        for rank, other in enumerate(found):
            if other != found[0]:
                raise RankError(
                    f"rank {rank} {what} {other} where rank 0 {what} {found[0]}; all ranks must run the same steps"
                )

    def close(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def _in_contact(self) -> Iterator[None]:
        """A collective that fails or waits too long says that another rank is gone or elsewhere."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.out_of_contact = True
            raise RankError(f"rank {self.rank} lost contact with another rank: {str(error).splitlines()[0]}") from error

    def _exchange(self, values: list[int], error: BaseException | None = None) -> list[list[int]]:
        row = torch.zeros(ROW_INTS, dtype=torch.int64)
        row[: len(values)] = torch.tensor(values, dtype=torch.int64)
        rows = [torch.empty_like(row) for _ in range(self.size)]
        with self._in_contact():
            dist.all_gather(rows, row, group=self.control)
        found = [r.tolist() for r in rows]
        failed = [rank for rank, r in enumerate(found) if r[0] == _FAILED]
        if failed:
            self._share(failed[0], error)
        return found

    def _share(self, failed: int, error: BaseException | None) -> None:
        """Every rank has seen in an exchange that `failed` raised: raise its reason, on a rank with no error of its own."""
        reasons: list = [None] * self.size
        with self._in_contact():
            dist.all_gather_object(reasons, _reason(error), group=self.control)
        if error is not None:
            return
        is_input, text = reasons[failed]
        if is_input:
            raise RankInputError(f"rank {failed}: {text}")
        raise RankError(f"rank {failed} failed ({text}); this rank ({self.rank}) stops with it")


def _reason(error: BaseException | None) -> tuple[bool, str] | None:
    """(whether the user's input is wrong, what is said of it in a line)."""
    if error is None:
        return None
    line = " ".join(str(error).split())[:1000]
    return (True, line) if isinstance(error, ZftError) else (False, f"{type(error).__name__}: {line}")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def _device(name: str | torch.device | None, local_rank: int) -> torch.device:
    if name is not None:
        device = torch.device(name)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ZftError(f"compute_device={name} but this machine has no usable CUDA GPU; use compute_device=cpu")
        return torch.device("cuda", local_rank) if device.type == "cuda" and device.index is None else device
    return torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")


def _mesh(rank: int, size: int, shard_ranks: int | None, everyone: object, timeout: timedelta) -> Mesh:
    shard = shard_ranks or size
    if size % shard:
        raise ZftError(f"engine.shard_ranks={shard} does not divide the {size} ranks; choose a divisor of {size}")
    replicate = size // shard
    if replicate == 1:
        return Mesh(size, 1, rank, everyone, None)
    shard_groups = [dist.new_group([r * shard + s for s in range(shard)], timeout=timeout) for r in range(replicate)]
    replicate_groups = [
        dist.new_group([r * shard + s for r in range(replicate)], timeout=timeout) for s in range(shard)
    ]
    return Mesh(shard, replicate, rank % shard, shard_groups[rank // shard], replicate_groups[rank % shard])
