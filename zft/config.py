"""Configuration: enums, defaults, frozen dataclasses, and the error that names a bad value.

The one place where a default lives. Everything else imports from here; this file imports nothing of zft.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class ZftError(Exception):
    """A mistake in the user's input: what is wrong, which value, how to fix it. The command exits with status 2."""


class Tier(StrEnum):
    """Where bytes live. Without a GPU, device and cpu are separately counted buffers in the same RAM."""

    device = "device"
    cpu = "cpu"
    nvme = "nvme"


class Precision(StrEnum):
    """What the optimizer keeps for a parameter: bf16 hi+lo+m+v (12 bytes), fp16 hi+master+m+v (14), fp32 w+m+v (12)."""

    auto = "auto"
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


class Activation(StrEnum):
    """What a unit keeps for the backward pass.

    none: its whole graph; full: its inputs only (recomputes everything); selective: inputs and attention outputs;
    offload: inputs, moved to `activation_tier`.
    """

    none = "none"
    full = "full"
    selective = "selective"
    offload = "offload"


class Nonfinite(StrEnum):
    """What a step does when its gradient norm is not finite: leave everything untouched and count it, or raise."""

    skip = "skip"
    # `raise` is a Python keyword, the value is what the user types
    raise_ = "raise"


@dataclass(frozen=True)
class AdamW:
    """Decoupled weight decay Adam (Loshchilov & Hutter 2019, arXiv 1711.05101, algorithm 2)."""

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Applied to matrices only: norms and biases are never decayed."""
    compact: bool = False
    """8-bit moments and residual with block scales (hi 2 + lo 1 + m 1 + v 1 bytes). Not exact."""


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum (no dampening, no Nesterov), as in torch.optim.SGD."""

    lr: float = 1e-3
    momentum: float = 0.9
    weight_decay: float = 0.0


@dataclass(frozen=True)
class Lion:
    """Sign of an interpolated momentum (Chen et al. 2023, arXiv 2302.06675, algorithm 2)."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0


Optim = AdamW | SGD | Lion


@dataclass(frozen=True)
class EngineConfig:
    """Where state lives and how a step runs. The fields are the keys of `engine.*`."""

    stage: int = 3
    """What is sharded over ranks: 0 nothing, 1 optimizer, 2 + gradients, 3 + parameters (DeepSpeed: zero_optimization.stage)."""
    param_tier: Tier = Tier.device
    """Home of the weights that compute, `hi` (DeepSpeed: offload_param)."""
    state_tier: Tier = Tier.device
    """Home of lo, m, v (DeepSpeed: offload_optimizer)."""
    grad_tier: Tier = Tier.device
    """Where finished gradients wait for the global norm."""
    nvme_dir: str | None = None
    """Folder for the nvme tier; required when any tier is nvme. One run at a time."""
    precision: Precision = Precision.auto
    """auto is bf16."""
    compute_dtype: str = "auto"
    """auto, float32, bfloat16 or float16. auto is what multiplies fastest: the record's dtype on a GPU; on a CPU float32, or
    bfloat16 where the CPU has tiles for it (AMX). The record, and so the master, is the same either way."""
    activation: Activation = Activation.full
    activation_tier: Tier = Tier.cpu
    """Where activation=offload moves unit inputs: cpu or nvme."""
    max_grad_norm: float | None = 1.0
    """Clip to this global L2 norm; null turns clipping off."""
    nonfinite: Nonfinite = Nonfinite.skip
    wave: int | None = None
    """Micro-batches that pass through a unit together; null: all of a step."""
    compute_device: str | None = None
    """null: cuda if there is one, else cpu."""
    optim: Optim = field(default_factory=AdamW)
    compile: bool = False
    """torch.compile each unit's inner forward."""
    seed: int = 0
    """Seeds dropout, one stream for each (seed, step, micro-batch)."""
    shard_ranks: int | None = None
    """Ranks that share one copy; null: all. Fewer makes a replicate x shard mesh (must divide the world size)."""
    reduce_dtype: str = "float32"
    """Dtype in which gradients are reduced over ranks: float32 or bfloat16."""
    update_threads: int | None = None
    """Threads of the streamed update; null: the cores this process may use."""
    nvme_threads: int = 4
    """NVMe requests in flight."""
    loss_chunk_bytes: int = 64 << 20
    """Upper bound for one chunk of float32 logits in the default loss."""
    timeout_s: float = 600.0
    """A collective that waits longer than this raises on every rank (seconds)."""
    pin_memory: bool = True
    """Pin the host buffers that cross PCIe. Without a GPU this has no effect."""


class Method(StrEnum):
    """What is trained: every weight, or an adapter of PEFT's."""

    full = "full"
    lora = "lora"
    dora = "dora"
    rslora = "rslora"
    qlora = "qlora"


class Schedule(StrEnum):
    """The learning rate after warm-up (zft.optim.schedules); wsd holds it and decays in the last fifth."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    wsd = "wsd"


class Format(StrEnum):
    """The shape of a row. auto: told from the columns of a source's first row."""

    auto = "auto"
    messages = "messages"
    sharegpt = "sharegpt"
    alpaca = "alpaca"
    prompt_completion = "prompt_completion"
    text = "text"
    preference = "preference"
    unpaired = "unpaired"


class Truncate(StrEnum):
    """What happens to a row longer than seq_len.

    cut: keep its first seq_len tokens; drop: leave it out; error: refuse the data; split: go on in a further sequence
    that repeats one token, so that no target is lost. auto: split documents (pretraining, .txt files), cut the rest.
    """

    auto = "auto"
    cut = "cut"
    drop = "drop"
    error = "error"
    split = "split"


class TrainOn(StrEnum):
    """Which tokens of a conversation are targets: every assistant turn, the last one, or all tokens."""

    assistant = "assistant"
    last = "last"
    all = "all"


class OnError(StrEnum):
    """What a bad row does: stop with its file and line, or be counted and left out."""

    # `raise` is a Python keyword, the value is what the user types
    raise_ = "raise"
    skip = "skip"


@dataclass(frozen=True)
class DataSource:
    """One entry of `data=`: a file, a folder or a Hub id, and its share in a mixture (null: by its size)."""

    path: str
    weight: float | None = None


@dataclass(frozen=True)
class DataOptions:
    """How rows are read, rendered, cut and batched: the keys of `data_options.*`."""

    format: Format = Format.auto
    split: str = "train"
    """Split of a Hub data set; in a folder, files of other splits (by name: train, test, validation) are left out."""
    subset: str | None = None
    """Configuration name of a Hub data set that has several."""
    columns: dict[str, str] = field(default_factory=dict)
    """zft's name → the file's name, as in {instruction: question, output: answer}."""
    pack: bool | None = None
    """Fill sequences of seq_len with several rows that don't see each other. null: pretraining yes, sft no."""
    padding_free: bool = False
    """Lay a micro-batch's rows out in one row without padding. Flash attention keeps packed rows apart only this way."""
    length_grouped: bool = False
    """Put rows of similar length in one micro-batch (less padding; not with packing)."""
    truncate: Truncate = Truncate.auto
    train_on: TrainOn = TrainOn.assistant
    chat_template: str | None = None
    """chatml, a template file, or a template; null: the tokenizer's own."""
    fold_system: bool = False
    """Where the template refuses a system turn, put its text at the head of the first user turn."""
    on_error: OnError = OnError.raise_
    streaming: bool = False
    """Read a Hub data set as a stream, without a copy of it on the disk. Local files are always streamed."""
    max_rows: int | None = None
    """Stop reading after so many rows (of each file list entry)."""
    num_workers: int = 0
    """Processes that render and tokenize; 0: this one. The result doesn't depend on it."""
    eval_share: float = 0.0
    """Share of the rows held out for evaluation, between 0 and 1; taken before packing."""


@dataclass(frozen=True)
class MethodConfig:
    """What is trained: the keys of `method.*`. All but the name concern adapters."""

    name: Method = Method.full
    r: int = 16
    """Rank of the adapter."""
    alpha: float = 32.0
    """The adapter's output is scaled by alpha / r (rslora: alpha / sqrt(r))."""
    dropout: float = 0.0
    """Probability with which the adapter's input is zeroed."""
    targets: tuple[str, ...] = ("all-linear",)
    """Names or patterns of the modules that get an adapter; all-linear: every linear layer but the head."""
    modules_to_save: tuple[str, ...] = ()
    """Modules trained in full beside the adapter."""
    init: str = "default"
    """First values of the adapter: default (Kaiming, B zero) or gaussian. Those that change the base are refused."""
    adapter: str | None = None
    """Folder of an adapter to go on from; its rank, scale and targets hold."""


@dataclass(frozen=True)
class TrainConfig:
    """The length of a run and its step: the keys of `train.*`."""

    steps: int | None = None
    """Optimizer steps; null: as many as `epochs` gives."""
    epochs: float = 1.0
    """Passes over the data, when `steps` is null; 0.5 is half of it."""
    micro_batch_size: int = 1
    """Sequences of one forward pass, on each rank."""
    grad_accum_steps: int = 8
    """Micro-batches of one optimizer step, on each rank. They do not repeat the weight traffic."""
    seq_len: int = 2048
    """Longest sequence, in tokens."""
    lr: float | None = None
    """Peak learning rate; null: 1e-5 for every weight, 2e-4 for adapters (sgd 1e-3, lion 1e-6)."""
    warmup_steps: int = 0
    """Steps over which the learning rate grows from zero."""
    schedule: Schedule = Schedule.cosine
    min_lr_ratio: float = 0.0
    """The schedule ends at this share of the peak."""
    weight_decay: float = 0.0
    """Norms and biases are never decayed."""
    max_grad_norm: float | None = 1.0
    """Clip to this global L2 norm; null turns clipping off."""
    seed: int = 0
    """Seeds the order of the data and dropout."""
    save_every: int | None = None
    """Steps between checkpoints; null: only at the end."""
    keep: int = 2
    """Newest checkpoints that stay; the best one stays too."""
    eval_every: int | None = None
    """Steps between evaluations on `eval_data`; null: only at the end."""
    stop_after: int | None = None
    """Stop with a checkpoint after this step, the schedule untouched; `zft resume` goes on."""


@dataclass(frozen=True)
class Hardware:
    """Sizes (GiB), bandwidths (GB/s) and speed of one rank's machine; null: measured here. For the planner."""

    name: str = "this"
    device_gib: float | None = None
    """Memory of one device that a rank may use."""
    host_gib: float | None = None
    """Host memory that a rank may use."""
    nvme_gib: float | None = None
    """Room on the NVMe disk for a rank."""
    h2d_gbps: float | None = None
    """Host to device."""
    d2h_gbps: float | None = None
    """Device to host."""
    dram_gbps: float | None = None
    """Host memory, reads and writes together."""
    nvme_read_gbps: float | None = None
    """Reads of the NVMe disk."""
    nvme_write_gbps: float | None = None
    """Writes to the NVMe disk."""
    tflops: float | None = None
    """Dense bfloat16 matrix products (10^12 operations a second)."""


@dataclass(frozen=True)
class RunConfig:
    """A whole run, resolved. `zft.compose` makes it from the command line, `OUT/config.yaml` keeps it."""

    recipe: str
    """A name of recipes/ or the path of a script."""
    model: str
    """Hub id, local folder or .gguf file."""
    data: tuple[DataSource, ...]
    """File (jsonl, json, csv, parquet, txt), folder or Hub id, or a list of them, with weights if need be."""
    out: str
    """Run folder; null: runs/RECIPE-MODEL-TIME."""
    engine: EngineConfig
    auto_tiers: tuple[str, ...] = ()
    """The tier fields of `engine` that the planner chooses."""
    eval_data: tuple[DataSource, ...] = ()
    """Data to evaluate on, given like `data`."""
    method: MethodConfig = field(default_factory=MethodConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data_options: DataOptions = field(default_factory=DataOptions)
    hardware: Hardware = field(default_factory=Hardware)
    overwrite: bool = False
    """Replace an earlier run's folder."""
    nproc: int = 1
    """Ranks to start on this machine."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    track: str | None = None
    """trackio or wandb: send the metrics there too."""
    samples: int = 0
    """Prompts of the data that the base and the export answer, for the report; loads the whole model. 0: none."""
