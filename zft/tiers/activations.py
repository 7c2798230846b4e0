"""Boundary activations moved off the device between the forward and the backward pass."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import torch

from zft.config import Tier
from zft.tiers.cpu import aligned_empty
from zft.tiers.device import Recorder, recorded, unrecorded
from zft.tiers.nvme import NvmeFile, NvmeFolder
from zft.tiers.page import round_up
from zft.tiers.slab import Traffic


class Boundary:
    """One tensor on a lower tier. `get` brings it back, once; `prefetch` starts that early."""

    def __init__(self, store: ActivationStore, tensor: torch.Tensor):
        self.store, self.shape, self.dtype, self.device = store, tensor.shape, tensor.dtype, tensor.device
        self.numel_bytes = tensor.numel() * tensor.dtype.itemsize
        self.host: torch.Tensor | None = None
        self.shared: torch.Tensor | None = None
        """The tensor itself, where `host` is its memory: it must not change until `get`."""
        self.place: tuple[NvmeFile, int] | None = None
        self.written: Future | None = None
        self.reading: Future | None = None

    def prefetch(self) -> None:
        if self.store.tier is Tier.nvme and self.reading is None:
            self.written.result()
            self.host = aligned_empty(self.numel_bytes)
            self.reading = self.place[0].read(self.place[1], self.host)
            self.store.traffic.add("nvme_read", self.numel_bytes)

    def get(self) -> torch.Tensor:
        self.prefetch()
        if self.reading is not None:
            self.reading.result()
            self.store.free(self.place, self.numel_bytes)
        host, self.host = self.host, None
        self.store.traffic.add("h2d", self.numel_bytes)
        tensor = host.view(self.dtype).view(self.shape)
        if tensor.device == self.device:
            return tensor
        with recorded(self.store.recorder, "h2d", "activations"):
            return tensor.to(self.device, non_blocking=True)


EXTENT_BYTES = 64 << 20


class ActivationStore:
    """Keeps boundary activations on the cpu or nvme tier. Its files grow to what one wave needs and are reused."""

    def __init__(self, tier: Tier, folder: NvmeFolder | None, traffic: Traffic, recorder: Recorder = unrecorded):
        self.tier, self.folder, self.traffic, self.recorder = tier, folder, traffic, recorder
        self.files: list[NvmeFile] = []
        self.end = 0
        self.holes: dict[int, list[tuple[NvmeFile, int]]] = {}
        self.lock = threading.Lock()

    def put(self, tensor: torch.Tensor) -> Boundary:
        """Start moving a tensor; the caller may drop it."""
        boundary = Boundary(self, tensor)
        self.traffic.add("d2h", boundary.numel_bytes)
        if self.tier is Tier.cpu and tensor.device.type == "cpu":
            flat = tensor.contiguous()
            boundary.host = flat.view(-1).view(torch.uint8)
            boundary.shared = tensor if flat.data_ptr() == tensor.data_ptr() else None
            return boundary
        host = aligned_empty(boundary.numel_bytes)
        with recorded(self.recorder, "d2h", "activations"):
            host.view(tensor.dtype).copy_(tensor.reshape(-1))
        if self.tier is Tier.cpu:
            boundary.host = host
            return boundary
        boundary.place = self._reserve(boundary.numel_bytes)
        boundary.written = boundary.place[0].write(boundary.place[1], host)
        self.traffic.add("nvme_write", boundary.numel_bytes)
        return boundary

    def free(self, place: tuple[NvmeFile, int], count_bytes: int) -> None:
        with self.lock:
            self.holes.setdefault(round_up(count_bytes), []).append(place)

    def _reserve(self, count_bytes: int) -> tuple[NvmeFile, int]:
        size = round_up(count_bytes)
        with self.lock:
            if self.holes.get(size):
                return self.holes[size].pop()
            if not self.files or self.end + size > self.files[-1].nbytes:
                self.files.append(self.folder.create(f"activations-{len(self.files)}", max(size, EXTENT_BYTES)))
                self.end = 0
            place, self.end = (self.files[-1], self.end), self.end + size
        return place
