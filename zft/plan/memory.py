"""Peak bytes of one rank on each tier, item by item, as the engine allocates them.

Without a GPU the device's buffers lie in host memory, and every buffer costs the pages that were touched, not its capacity;
with one, a pool's buffer is as large as its largest user.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from zft.config import Activation, EngineConfig, Tier
from zft.dist import World
from zft.engine.layout import round_up
from zft.engine.record import PAGE_BYTES
from zft.engine.update import CHUNK_NUMEL
from zft.plan.shapes import GroupShape, Kind, ModelShape
from zft.plan.traffic import boundary_bytes, carrying_units, is_immediate
from zft.tiers.activations import EXTENT_BYTES

MIB = 1 << 20
PROCESS_BYTES = 470 * MIB
"""Python with torch, transformers and the compiled update loaded, and what they allocate (measured, torch 2.13)."""
CUDA_CONTEXT_BYTES = 600 * MIB
"""The driver's context, cuBLAS workspaces and fragmentation, on the device."""
CUDA_HOST_BYTES = 900 * MIB
"""What the CUDA libraries add to a process's resident memory."""


@dataclass(frozen=True)
class Batch:
    """The micro-batches of one step on one rank."""

    rows: int
    """Sequences in a micro-batch."""
    seq_len: int
    """Tokens of the longest one, padding included: what memory is planned for."""
    micro_batches: int
    mean_len: float | None = None
    """Tokens of a usual one: what time is planned for; null: seq_len."""

    @property
    def micro_tokens(self) -> int:
        return self.rows * self.seq_len

    @property
    def tokens(self) -> int:
        return round(self.rows * (self.mean_len or self.seq_len) * self.micro_batches)

    def waves(self, wave: int | None) -> int:
        return -(-self.micro_batches // (wave or self.micro_batches))

    def wave_tokens(self, wave: int | None) -> int:
        return self.micro_tokens * min(wave or self.micro_batches, self.micro_batches)


@dataclass
class Memory:
    """Peak bytes by tier and item."""

    device: dict[str, int] = field(default_factory=dict)
    host: dict[str, int] = field(default_factory=dict)
    nvme: dict[str, int] = field(default_factory=dict)

    def add(self, tier: Tier, item: str, count_bytes: float) -> None:
        if count_bytes > 0:
            items = {Tier.device: self.device, Tier.cpu: self.host, Tier.nvme: self.nvme}[tier]
            items[item] = items.get(item, 0) + int(count_bytes)

    def total(self, tier: Tier) -> int:
        return sum({Tier.device: self.device, Tier.cpu: self.host, Tier.nvme: self.nvme}[tier].values())


def memory_of(shape: ModelShape, config: EngineConfig, world: World, batch: Batch) -> Memory:
    """What a rank of a run holds at its peak. On a CPU everything of the device is counted as host memory."""
    memory, cuda = Memory(), world.device.type == "cuda"
    _records(memory, shape, config, world, batch)
    _pools(memory, shape, config, world)
    _activations(memory, shape, config, batch, cuda)
    memory.add(Tier.cpu, "process", PROCESS_BYTES + (CUDA_HOST_BYTES if cuda else 0))
    if cuda:
        memory.add(Tier.device, "context", CUDA_CONTEXT_BYTES)
        return memory
    for item, count_bytes in memory.device.items():
        memory.host[item] = memory.host.get(item, 0) + count_bytes
    memory.device.clear()
    return memory


def _records(memory: Memory, shape: ModelShape, config: EngineConfig, world: World, batch: Batch) -> None:
    waves = batch.waves(config.wave)
    for group in shape.groups:
        ranges = group.ranges(config.stage, world)
        rows = [("weights", config.param_tier, group.hi_size(ranges.hi_numel))]
        if group.trainable:
            state = sum(f.bytes(ranges.state_numel) for f in group.state_fields)
            rows.append(("optimizer state", config.state_tier, state))
            rows.append(("gradients", config.grad_tier, ranges.grad_numel * group.grad_bytes))
            if _is_parked(shape, group, waves):
                rows.append(("partial gradients", config.grad_tier, ranges.grad_numel * 4))
        for item, tier, count_bytes in rows:
            memory.add(tier, item, round_up(count_bytes, PAGE_BYTES))


def _is_parked(shape: ModelShape, group: GroupShape, waves: int) -> bool:
    """Does a float32 partial gradient wait between visits? With several waves, and where head and embedding are tied."""
    if group.replicated:
        return False
    return waves > 1 or sum(group in unit.needed for unit in shape.units) > 1


def _pools(memory: Memory, shape: ModelShape, config: EngineConfig, world: World) -> None:
    """The engine's reusable buffers: unsharded weights, staged weights, gradients at hand, update staging."""
    cuda, sharded = world.device.type == "cuda", world.mesh.shard > 1 and config.stage > 0
    narrow = any(g.compute_bytes != g.hi_bytes for g in shape.groups)

    def at_once(size: Callable[[GroupShape], int], trained: bool = False, visits: int = 1) -> int:
        """Of the largest unit, for so many units at once; on a GPU every buffer is as large as the largest group."""
        units = [[g for g in unit.needed if g.trainable or not trained] for unit in shape.units]
        if not cuda:
            return visits * max((sum(map(size, groups)) for groups in units), default=0)
        largest = max((size(g) for groups in units for g in groups), default=0)
        return visits * largest * max(map(len, units), default=0)

    def staying(size: Callable[[GroupShape], int]) -> int:
        """Of the leftovers, which keep their buffers."""
        largest = max(map(size, shape.groups), default=0) if cuda else 0
        return sum(max(size(g), largest) for g in shape.leftovers)

    def full(group: GroupShape) -> int:
        return group.padded_numel * group.compute_bytes

    def staged(group: GroupShape) -> int:
        return group.hi_size(group.ranges(config.stage, world).hi_numel)

    def grad(group: GroupShape) -> int:
        return group.ranges(config.stage, world).grad_numel * group.grad_bytes if group.trainable else 0

    if narrow:
        memory.add(Tier.device, "unsharded unit", at_once(full) + staying(full))
    if sharded:
        memory.add(
            Tier.device, "gathered weights", at_once(lambda g: g.hi_size(g.padded_numel), visits=1 if narrow else 2)
        )
    if cuda and config.param_tier is not Tier.device:
        memory.add(Tier.device, "weights on their way", at_once(staged, visits=2) + (0 if narrow else staying(staged)))
    if config.param_tier is Tier.nvme:
        memory.add(Tier.cpu, "staged weights", at_once(staged, visits=1 if narrow and not cuda else 2))
    small = sum(g.padded_numel * 4 for g in shape.leftovers if g.trainable)
    memory.add(Tier.device, "gradient of a unit", at_once(lambda g: g.padded_numel * 4, trained=True) + small)
    if cuda:
        memory.add(Tier.device, "gradient on its way", at_once(grad, trained=True))
    if world.mesh.shard > 1:
        memory.add(
            Tier.device,
            "reduced gradient",
            at_once(lambda g: g.ranges(config.stage, world).grad_numel * 4, trained=True),
        )
    if config.grad_tier is Tier.nvme or is_immediate(config):
        memory.add(Tier.cpu, "staged gradients", 2 * max(map(grad, shape.groups), default=0))
    memory.add(Tier.cpu, "update staging", _update_staging(shape, config))


def _update_staging(shape: ModelShape, config: EngineConfig) -> int:
    """One chunk of everything that is not resident, for each worker (zft.engine.update)."""
    if Tier.nvme not in (config.param_tier, config.state_tier, config.grad_tier) or not shape.trained_numel:
        return 0
    fields = next(g for g in shape.groups if g.trainable).fields
    chunk = sum(f.bytes(CHUNK_NUMEL) for f in fields[1:]) if config.state_tier is Tier.nvme else 0
    chunk += 2 * CHUNK_NUMEL if config.grad_tier is Tier.nvme else 0
    return chunk * max(config.update_threads or len(os.sched_getaffinity(0)), 4)


def _activations(memory: Memory, shape: ModelShape, config: EngineConfig, batch: Batch, cuda: bool) -> None:
    dims, item = shape.dims, shape.compute_bytes
    tokens = batch.wave_tokens(config.wave)
    layers = sum(unit.kind is Kind.LAYER for unit in carrying_units(shape))
    per_layer = boundary_bytes(shape, tokens)
    if config.activation is Activation.none:
        memory.add(Tier.device, "kept graphs", layers * tokens * graph_bytes(shape))
    elif config.activation is Activation.offload:
        whole = layers * per_layer
        at = Tier.cpu if config.activation_tier is Tier.cpu else Tier.nvme
        memory.add(at, "boundary activations", whole if at is Tier.cpu else round_up(whole, EXTENT_BYTES))
    else:
        memory.add(Tier.device, "boundary activations", layers * per_layer)
    if config.activation is Activation.selective:
        memory.add(Tier.device, "kept attention", layers * tokens * dims.heads * (dims.head_dim * item + 4))
    # hidden states at the head, with the norm before it in float32, and gradients on their way back
    memory.add(Tier.device, "hidden states at hand", 2 * per_layer + 2 * tokens * dims.hidden * 4)
    rows = min(batch.micro_tokens, max(1, config.loss_chunk_bytes // (4 * dims.vocab)))
    loss = 2 * rows * dims.vocab * 4 + (rows * dims.vocab * item if item < 4 else 0)
    unit = batch.micro_tokens * (graph_bytes(shape) + _backward_bytes(shape)) + _matrix_gradient_bytes(shape)
    if cuda:
        memory.add(Tier.device, "activations of a unit, or loss chunk", max(loss, unit))
        return
    # the C library keeps what the other has freed
    memory.add(Tier.device, "activations of a unit", unit)
    memory.add(Tier.device, "loss chunk", loss)


def _matrix_gradient_bytes(shape: ModelShape) -> int:
    """The largest weight gradient of a layer, before it is added to the sum."""
    groups = [g for unit in shape.units if unit.kind is Kind.LAYER for g in unit.groups if g.trainable]
    return max((span.numel * g.compute_bytes for g in groups for span in g.layout.spans), default=0)


def graph_bytes(shape: ModelShape) -> int:
    """What a decoder layer saves for its backward pass, for each token (Llama's operations; flash attention)."""
    dims, item = shape.dims, shape.compute_bytes
    attention = dims.heads * dims.head_dim * 3 + dims.kv_heads * dims.head_dim * 2
    return item * (7 * dims.hidden + attention + 4 * dims.intermediate) + 4 * 2 * dims.hidden * (item < 4)


def _backward_bytes(shape: ModelShape) -> int:
    """Gradients inside a layer that live at once, for each token."""
    return shape.compute_bytes * (2 * shape.dims.hidden + 2 * shape.dims.intermediate)
