"""The façade: a model and a configuration become an engine; a step takes micro-batches.

engine = Engine.from_pretrained(path, EngineConfig(param_tier="nvme", nvme_dir="/fast/disk", ...))
result = engine.step(micro_batches, lr=1e-5)
engine.export("out")
"""

from __future__ import annotations

import dataclasses
import inspect
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zft.checkpoint.adapter import export_adapter, is_adapter
from zft.checkpoint.base import fingerprint
from zft.checkpoint.hf import base_dtype, export_folder
from zft.checkpoint.merge import merged_units, plain_model
from zft.checkpoint.names import base_model
from zft.checkpoint.restore import load_checkpoint
from zft.checkpoint.sharded import Content, Saving
from zft.config import (
    SGD,
    Activation,
    AdamW,
    EngineConfig,
    Lion,
    Method,
    MethodConfig,
    Nonfinite,
    Precision,
    Tier,
    ZftError,
)
from zft.dist import World
from zft.engine.fill import fill_record
from zft.engine.parts import Anatomy, Parts
from zft.engine.step import EvalResult, LossFn, Stepper, StepResult
from zft.engine.stream import group_tensors
from zft.models.loss import HeadLoss, aux_loss, shift_labels
from zft.models.nf4 import NF4
from zft.models.plain import check_unwrapped, without_cache
from zft.precision import resolve_precision

__all__ = ["SGD", "AdamW", "Engine", "EngineConfig", "EvalResult", "Lion", "StepResult", "World"]


class CausalObjective:
    """The default loss, as the engine asks for it."""

    def __init__(self, model: nn.Module, chunk_bytes: int):
        self.head = model.get_output_embeddings()
        self.loss = HeadLoss(model, chunk_bytes)
        self.config = model.config

    def targets(self, labels: torch.Tensor) -> torch.Tensor:
        return shift_labels(labels)

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor, call: Callable) -> torch.Tensor:
        return self.loss.forward(self.head, hidden, targets, call)

    def forward_backward(self, hidden, targets, scale: float, grads: dict, call: Callable):
        return self.loss.forward_backward(self.head, hidden, targets, scale, grads, call)

    def placeholder(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.loss.placeholder(hidden, self.head)

    def extra(self, output: Any) -> torch.Tensor | None:
        return aux_loss(output, self.config)


class Engine:
    """A model whose parameters live on the tiers that the configuration names, and the step that trains it.

    `model` may hold its weights (they move into the engine and the model keeps shapes only) or lie on meta with a `source`
    that reads them unit by unit. Raises ZftError for a configuration that cannot work.
    """

    def __init__(
        self,
        model: nn.Module,
        config: EngineConfig,
        source: Any = None,
        world: World | None = None,
        record: Callable[[str, str, float, float], None] = lambda *_: None,
    ):
        self.config = config = checked(config)
        check_unwrapped(model)
        self.world = world or World.from_env(config.compute_device, config.shard_ranks, config.timeout_s)
        self.model, self.source_folder, self.tokenizer = model, getattr(source, "folder", None), None
        self.source, self.saving, self._base = source, None, None
        held = {} if source is not None else {name: p.detach() for name, p in model.named_parameters()}
        self._load_buffers(source)
        self.parts = Parts(model, anatomy_of(model, config), config, self.world, _objective(model, config), record)
        self.stepper = Stepper(self.parts, config)
        try:
            self._load(source, held)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def from_pretrained(path: str | Path, config: EngineConfig, world: World | None = None, **options: Any) -> Engine:
        """Build the model of a folder, Hub id or .gguf file on meta and stream its weights into place, unit by unit.

        options: trust_remote_code, attn_implementation, record; method: a MethodConfig, to train an adapter on the frozen
        model. Raises ZftError for a model that cannot be loaded.
        """
        from zft.models.adapters import attach_adapter
        from zft.models.hub import resolve_model
        from zft.models.load import build_model
        from zft.models.weights import HubWeights

        record, method = options.pop("record", lambda *_: None), options.pop("method", MethodConfig())
        config = checked(config)
        device = (
            "cuda" if config.compute_device is None and torch.cuda.is_available() else config.compute_device or "cpu"
        )
        folder = resolve_model(str(path))
        model = build_model(folder, dtype=resolve_precision(config, device).hi_dtype, **options)
        source = HubWeights(folder, model)
        if method.name is not Method.full:
            model, source = attach_adapter(model, source, method, config.seed)
        return Engine(model, config, source, world, record)

    @property
    def step_count(self) -> int:
        """Optimizer steps done; skipped ones do not count."""
        return self.stepper.step_count

    def step(
        self, micro_batches: list[dict[str, torch.Tensor]], lr: float | None = None, loss_fn: LossFn | None = None
    ) -> StepResult:
        """One optimizer step over all micro-batches of all ranks.

        micro_batches: dicts of CPU tensors input_ids, labels [B, T] int64 (-100: not supervised), attention_mask,
        position_ids; shapes may differ. An empty list takes part without data. loss_fn(model, micro_batch) -> (sum, weight)
        replaces the default loss. Raises FloatingPointError where `nonfinite=raise` and a gradient is not finite, RankError
        when another rank failed, ZftError when no token is supervised.
        """
        with without_cache(self.model):
            return self.stepper.step(micro_batches, lr, loss_fn)

    def evaluate(self, micro_batches: list[dict[str, torch.Tensor]], adapter: bool = True) -> EvalResult:
        """Mean loss over the supervised tokens of all ranks, in eval mode; changes no state.

        adapter False: of the base model alone. Raises ZftError where there is no adapter to switch off.
        """
        if adapter:
            return self.stepper.evaluate(micro_batches)
        if not is_adapter(self.model):
            raise ZftError("evaluate(adapter=False) needs a model with an adapter; this one has none")
        with self.model.disable_adapter():
            return self.stepper.evaluate(micro_batches)

    def drain(self) -> None:
        """Apply every update that still waits for the next forward pass."""
        self.stepper.drain()

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(torch fqn, full float32 master on the CPU), one at a time; tied parameters once. Collective."""
        self.drain()
        for record in list(self.parts.records.values()):
            for name, tensor in group_tensors(record, self.world, master=True):
                yield name, tensor.clone()

    def stream_units(self, dtype: torch.dtype | None = None) -> Iterator[dict[str, torch.Tensor]]:
        """{torch fqn: CPU tensor} of one unit at a time; valid until the next. Collective.

        dtype None gives the weights that compute (`hi`); any other is rounded once from the float32 masters.
        """
        self.drain()
        self.parts.rest()
        for unit in [*self.parts.units, self.parts.leftovers]:
            named: dict[str, torch.Tensor] = {}
            for group in unit.groups:
                as_is = dtype is None or group.hi_dtype == dtype
                for name, tensor in group_tensors(self.parts.records[group], self.world, master=not as_is):
                    named[name] = tensor if as_is else tensor.to(dtype)
            yield named
        yield {name: b.cpu() for name, b in persistent_buffers(self.model)}

    def export(
        self, folder: str | Path, *, base: str | Path | None = None, dtype: torch.dtype | None = None, merge: bool = False,
        **options: Any,
    ):  # fmt: skip
        """Write a folder that `from_pretrained` loads, one unit at a time, and verify it. Collective; rank 0 writes.

        An adapter becomes the folder that PEFT loads on its base; merge: a full model with the adapter folded in, in
        float32 with one rounding. dtype: of the files; None: the base's (of an adapter: float32). options as in
        `zft.checkpoint.hf.ExportOptions` (tokenizer, max_shard_size, facts, ...). Returns the ExportReport on rank 0, else
        None. Raises ZftError, ExportError.
        """
        base = base or self.source_folder
        if not is_adapter(self.model):
            if merge:
                raise ZftError("only an adapter can be merged, and this engine trains every weight; leave merge out")
            dtype = dtype or base_dtype(self.model, Path(base) if base else None)
            units = self.stream_units(dtype)
            return on_main(
                self.world, units, lambda: export_folder(folder, units, self.model, base, dtype=dtype, **options)
            )
        units = self._trained_units()
        if merge:
            return on_main(self.world, units, lambda: export_merged(self, units, folder, dtype, options))
        trained = (values for _, values in units)
        return on_main(
            self.world, trained, lambda: export_adapter(folder, trained, self.model, base, dtype=dtype, **options)
        )

    def _trained_units(self) -> Iterator[tuple[list[str], dict[str, torch.Tensor]]]:
        """(names of all parameters, trained parameters in float32 on the CPU) of one unit at a time. Collective."""
        self.drain()
        self.parts.rest()
        for unit in [*self.parts.units, self.parts.leftovers]:
            names = [span.name for group in unit.groups for span in group.layout.spans]
            trained = {}
            for record in (self.parts.records[group] for group in unit.groups if group.trainable):
                trained |= dict(group_tensors(record, self.world, master=True))
            yield names, trained

    def save(self, folder: str | Path, train_state: dict | None = None, wait: bool = True) -> None:
        """Write everything that training goes on from as checkpoint `folder`, one bounded buffer at a time. Collective.

        train_state: plain data (what json holds) that `load` gives back. wait False: only begin; the next step computes
        meanwhile, its updates wait where they must, and `finish_save` completes the checkpoint. Frozen weights are stored
        only if they have no base model to come from again. A checkpoint of that name is replaced; it or its successor is
        whole at any moment. Raises ZftError where `folder` is something else, OSError where the disk fails, on all ranks.
        """
        self.finish_save()
        self.stepper.check_usable()
        facts = {"precision": str(self.parts.plan.precision), "stage": self.config.stage, "ranks": self.world.size}
        buffers = dict(persistent_buffers(self.model))
        if self.source is not None and any(record.rule is None for record in self.parts.records.values()):
            facts["base"] = self._base = self._base or fingerprint(self.source_folder)
        content = Content({**self.stepper.counters(), **facts}, train_state or {}, buffers, self.source is None)
        self.saving = Saving(Path(folder), self.parts, content)
        if wait:
            self.saving.copy()
            self.finish_save()
        else:
            self.saving.start()

    def finish_save(self, wait: bool = True) -> bool:
        """Complete a checkpoint that was begun with `wait=False`: True if it has got its name by this call. Collective.

        wait False: only if every rank has copied its state. Raises what went wrong with it, on all ranks.
        """
        saving = self.saving
        if saving is None or not (wait or all(row[0] for row in self.world.gather_ints([int(saving.is_copied)]))):
            return False
        self.saving = None
        saving.finish()
        return True

    def load(self, folder: str | Path) -> dict:
        """Go on from a checkpoint, saved at any world size, stage and placement. Collective; returns its train_state.

        Raises zft.checkpoint.manifest.DamagedCheckpoint, or ZftError naming what differs from this engine; both before
        anything is changed.
        """
        self.finish_save()
        manifest = load_checkpoint(
            Path(folder), self.parts, dict(persistent_buffers(self.model)), base=lambda: fingerprint(self.source_folder)
        )
        self.stepper.restore_counters(manifest.engine)
        self.parts.traffic.take()
        return manifest.train

    def peak_bytes(self) -> dict[str, int]:
        """Highest use so far: host_rss of this process, device (allocated), nvme (allocated in files)."""
        device = torch.cuda.max_memory_allocated(self.world.device) if self.world.device.type == "cuda" else 0
        nvme = sum(record.nvme_bytes(self.config) for record in self.parts.records.values())
        return {"host_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "device": device, "nvme": nvme}

    def close(self) -> None:
        """Stop threads and remove files. Pending updates and an unfinished save are dropped: save or export before."""
        if self.saving is not None:
            self.saving.abandon()
        self.parts.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _load(self, source: Any, held: dict[str, torch.Tensor]) -> None:
        for record in self.parts.records.values():
            names = [span.name for span in record.group.layout.spans]
            weights = source.read(names) if source is not None else ((name, held.pop(name)) for name in names)
            fill_record(record, weights)
        self.parts.traffic.take()

    def _load_buffers(self, source: Any) -> None:
        names = [name for name, buffer in self.model.named_buffers() if buffer.is_meta]
        values = dict(source.read(names)) if names else {}
        for name, buffer in list(self.model.named_buffers()):
            parent, _, leaf = name.rpartition(".")
            value = values[name].to(buffer.dtype) if name in values else buffer
            self.model.get_submodule(parent)._buffers[leaf] = value.to(self.world.device)


def on_main(world: World, units: Iterator, write: Callable[[], Any]) -> Any:
    """What `write` returns on rank 0, which consumes `units`; the other ranks take part in gathering them."""
    report, error = None, None
    if world.is_main:
        try:
            report = write()
        except BaseException as raised:  # told to the other ranks below, which wait in the next agreement
            error = raised
    else:
        for _ in units:
            pass
    world.agree(error)
    return report


def export_merged(engine: Engine, units: Iterator, folder: str | Path, dtype: torch.dtype | None, options: dict) -> Any:
    """A full model from an engine's adapter and its base's own folder; one rank's work."""
    inner, base = base_model(engine.model), engine.source_folder
    if base is None:
        raise ZftError(
            "merging reads the base from its folder; build the engine with a source, as from_pretrained does"
        )
    dtype = dtype or base_dtype(inner, Path(base))
    plain = plain_model(inner, Path(base), type(inner).__module__.startswith("transformers_modules"))
    merged = merged_units(engine.model, engine.source, units, plain, dtype)
    return export_folder(folder, merged, plain, base, dtype=dtype, **options)


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, buffer) of what belongs into a state dict."""
    kept = set(model.state_dict(keep_vars=True))
    return ((name, buffer) for name, buffer in model.named_buffers() if name in kept)


def checked(config: EngineConfig) -> EngineConfig:
    """Strings become enums; values out of range raise ZftError, all of them in one line."""
    kinds = {"param_tier": Tier, "state_tier": Tier, "grad_tier": Tier, "activation_tier": Tier, "precision": Precision,
             "activation": Activation, "nonfinite": Nonfinite}  # fmt: skip
    values, problems = {}, []
    for name, kind in kinds.items():
        value = getattr(config, name)
        try:
            values[name] = kind(value)
        except ValueError:
            problems.append(f"engine.{name} is one of {', '.join(kind)}, got {value}")
    if config.stage not in (0, 1, 2, 3):
        problems.append(f"engine.stage is 0, 1, 2 or 3, got {config.stage}")
    if config.wave is not None and config.wave < 1:
        problems.append(f"engine.wave is at least 1 micro-batch, got {config.wave}")
    if config.max_grad_norm is not None and not config.max_grad_norm > 0:
        problems.append(f"max_grad_norm is positive or null, got {config.max_grad_norm}")
    if values.get("activation_tier") is Tier.device:
        problems.append("engine.activation_tier is cpu or nvme, got device; use activation=full to keep inputs there")
    if problems:
        raise ZftError("; ".join(problems))
    return dataclasses.replace(config, **values)


def anatomy_of(model: nn.Module, config: EngineConfig) -> Anatomy:
    """What the engine must know of a transformers (or plain) model."""
    ends = [getattr(model, name, lambda: None)() for name in ("get_input_embeddings", "get_output_embeddings")]
    inner, quantized = base_model(model), getattr(model, "_quantized_names", frozenset())
    main = next((p.dtype for p in model.parameters() if p.is_floating_point() and p.dim() > 1), torch.float32)
    wide = {name for name, p in model.named_parameters() if p.dtype == torch.float32 and main != torch.float32}
    return Anatomy(
        no_split=sorted(getattr(model, "_no_split_modules", None) or ()),
        embedding=ends[0],
        head=ends[1],
        sideways=list(_recorded(inner)),
        codec=lambda name: NF4 if name in quantized else None,
        arguments=frozenset(inspect.signature(inner.forward).parameters),
        keep_float32=wide.__contains__,
    )


def _recorded(model: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """(module, output index) that transformers' recorder listens to (transformers.utils.output_capturing)."""
    for submodel in model.modules():
        for key, specs in (getattr(submodel, "_can_record_outputs", None) or {}).items():
            for spec in specs if isinstance(specs, list) else [specs]:
                target = getattr(spec, "target_class", spec)
                if key == "hidden_states" or not isinstance(target, type):
                    continue
                index = getattr(spec, "index", 1)
                yield from ((module, index) for module in submodel.modules() if isinstance(module, target))


def _objective(model: nn.Module, config: EngineConfig) -> CausalObjective | None:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return CausalObjective(model, config.loss_chunk_bytes) if head is not None else None
