"""A plain PyTorch loop: checkpointing, clipping, fused AdamW. Variants: float32, bfloat16 (weights and moments, too)."""

from __future__ import annotations

import torch
from common import arguments, micro_batches, run_steps, targets
from transformers import AutoModelForCausalLM


def main() -> None:
    options = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.variant or "float32")).to(
        device
    )
    model.train()  # from_pretrained returns it in evaluation mode, in which transformers checkpoints nothing
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.config.use_cache = False
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


main()
