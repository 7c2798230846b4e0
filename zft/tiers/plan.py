"""Where a run's state goes when the user leaves it open. Pure arithmetic."""

from __future__ import annotations

from dataclasses import replace

from zft.config import EngineConfig, Tier, ZftError

RECORD_BYTES = 12
"""hi 2 + lo 2 + m 4 + v 4, for each trained parameter (fp32: w, m, v are as many)."""
GRAD_BYTES = 4
SHARE_USED = 0.7
"""Of free memory; the rest is for activations, the loss and the process."""


def place(config: EngineConfig, auto_tiers: tuple[str, ...], numel: int, ranks: int, free_bytes: dict[str, int]) -> EngineConfig:
    """`config` with the tiers in `auto_tiers` set to the first of device, cpu, nvme that holds them.

    numel: trained parameters. free_bytes: device, cpu and nvme, for one rank. Raises ZftError where nothing fits.
    """
    if not auto_tiers:
        return config
    needed = numel * (RECORD_BYTES + GRAD_BYTES) // (ranks if config.stage else 1)
    for tier in (Tier.device, Tier.cpu, Tier.nvme):
        if needed <= free_bytes[tier] * SHARE_USED:
            return replace(config, **dict.fromkeys(auto_tiers, tier))
    gib = {tier: f"{count / 2**30:.1f} GiB" for tier, count in free_bytes.items()}
    raise ZftError(
        f"the state of {numel / 1e9:.2f} B parameters needs {needed / 2**30:.1f} GiB a rank and none of "
        f"{', '.join(f'{tier} ({size})' for tier, size in gib.items())} has room; try optimizer=adamw_compact, a LoRA method or more ranks"
    )


def describe(config: EngineConfig) -> str:
    """`stage 3, weights cpu, state nvme, gradients cpu`."""
    return f"stage {config.stage}, weights {config.param_tier}, state {config.state_tier}, gradients {config.grad_tier}"
