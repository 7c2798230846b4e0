"""DeepSpeed ZeRO-3. Variants: cpu (all offloaded to host memory), nvme-optimizer, nvme-all (parameters, too); bf16, or
float32 with -float32 behind the name (a CPU may multiply it faster)."""

from __future__ import annotations

import contextlib
import os
import sys

from common import arguments, fresh, micro_batches, run_steps, single_rank


def main() -> None:
    options = arguments()
    single_rank()
    import torch

    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    with contextlib.redirect_stdout(sys.stderr):  # its banners are no JSON
        import deepspeed

        deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32 if options.variant.endswith("-float32") else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    parameters = sum(p.numel() for p in model.parameters())
    largest = max(p.numel() for p in model.parameters())
    model.train()  # from_pretrained returns it in evaluation mode, in which transformers checkpoints nothing
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    model.config.use_cache = False
    with contextlib.redirect_stdout(sys.stderr):
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=settings(options, largest)
        )
    batches = micro_batches(options, device)

    def step() -> float:
        total = 0.0
        for batch in batches:
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            total += float(loss.detach()) / len(batches)
        return total

    run_steps(options, step, parameters)
    if os.environ.get("BENCH_SAVE"):
        with contextlib.redirect_stdout(sys.stderr):
            engine.save_checkpoint(os.environ["BENCH_SAVE"])


def settings(options, largest: int) -> dict:
    """The published defaults for offload, with buffers that hold this model's largest parameter."""
    nvme = fresh(options.work / "deepspeed")
    optimizer: dict = {"device": "cpu"}
    parameter: dict = {"device": "cpu"}
    if options.variant.startswith("nvme"):
        optimizer = {"device": "nvme", "nvme_path": nvme, "buffer_count": 12, "pin_memory": False}
    if options.variant.startswith("nvme-all"):
        parameter = {
            "device": "nvme",
            "nvme_path": nvme,
            "buffer_count": 12,
            "buffer_size": largest + 1024,
            "pin_memory": False,
        }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": options.micro_batches,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": not options.variant.endswith("-float32")},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95], "weight_decay": 0.0}},
        "zero_optimization": {"stage": 3, "offload_optimizer": optimizer, "offload_param": parameter},
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 32,
            "thread_count": 2,
            "single_submit": False,
            "overlap_events": True,
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


main()
