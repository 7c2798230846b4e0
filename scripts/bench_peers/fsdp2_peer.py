"""PyTorch FSDP2 (fully_shard) on one rank: each layer its own unit, float32 on a CPU, bf16 compute on a GPU."""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import arguments, micro_batches, run_steps, single_rank, targets
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import AutoModelForCausalLM


def main() -> None:
    options = arguments()
    single_rank()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (1,))
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    model.train()  # from_pretrained returns it in evaluation mode, in which transformers checkpoints nothing
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.config.use_cache = False
    offload = CPUOffloadPolicy() if options.variant == "offload" else OffloadPolicy()
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if device == "cuda" else MixedPrecisionPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=offload)
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    batches = micro_batches(options, device)
    count = targets(batches)

    def step() -> float:
        total = 0.0
        for batch in batches:
            loss = model(**batch, num_items_in_batch=count).loss
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    run_steps(options, step, sum(p.numel() for p in model.parameters()))
    dist.destroy_process_group()


main()
