"""A plan for people: tables of bytes, time and placements."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from zft.config import Tier
from zft.plan.choose import Choice, Plan, bytes_text

GIB = 2**30


def render(choice: Choice, shown: int = 5) -> Group:
    """The chosen placement in full, and the next ones in a line each."""
    plan = choice.plan
    shape, batch = plan.shape, plan.batch
    trained = f", {shape.trained_numel / 1e6:,.0f} M trained" if shape.trained_numel != shape.numel else ""
    ranks = f"{plan.world.size} rank{'s' if plan.world.size > 1 else ''}"
    head = Text.assemble(
        (f"{shape.name}", "bold"), f"  {shape.numel / 1e9:.2f} B parameters{trained}; {ranks} on {plan.rates.name}\n",
        f"a step: {batch.micro_batches} × {batch.rows} × {batch.seq_len} = {batch.tokens:,} tokens a rank\n",
        ("placement: ", "bold"), f"{plan.placement}\n", ("because:   ", "bold"), choice.why,
    )  # fmt: skip
    parts = [head, memory_table(plan), time_table(plan), Text(wear_line(plan))]
    if choice.others:
        parts += [Text("next ones considered", style="bold"), placements_table([plan, *choice.others[:shown]])]
    return Group(*parts)


def memory_table(plan: Plan) -> Table:
    """Peak bytes of one rank, by tier and item."""
    table = Table(title="peak bytes of a rank", title_justify="left", box=None, pad_edge=False)
    for name, justify in (("tier", "left"), ("what", "left"), ("GiB", "right")):
        table.add_column(name, justify=justify)
    memory = plan.memory
    for tier, title, items in (
        (Tier.device, "device", memory.device), (Tier.cpu, "host", memory.host), (Tier.nvme, "nvme", memory.nvme),
    ):  # fmt: skip
        if not items:
            continue
        room = plan.rooms[tier]
        for place, (item, count) in enumerate(sorted(items.items(), key=lambda row: -row[1])):
            table.add_row(title if place == 0 else "", item, f"{count / GIB:.3f}")
        total = memory.total(tier)
        style = "bold red" if tier in plan.short else "bold"
        table.add_row(
            "", Text(f"total, of {room / GIB:,.1f} free", style=style), Text(f"{total / GIB:.3f}", style=style)
        )
    return table


def time_table(plan: Plan) -> Table:
    """Seconds that each resource is busy in the two phases."""
    time = plan.time
    names = list(time.forward.busy_s)
    table = Table(title="seconds of a step", title_justify="left", box=None, pad_edge=False)
    table.add_column("phase")
    for name in [*names, "takes"]:
        table.add_column(name, justify="right")
    for title, phase in (("forward", time.forward), ("backward", time.backward)):
        cells = [Text(f"{phase.busy_s[n]:.3g}", style="bold" if n == phase.limit else "") for n in names]
        table.add_row(title, *cells, f"{phase.seconds:.3g}")
    table.add_row("fill, drain", *[""] * len(names), f"{time.edges_s:.3g}")
    rate = plan.batch.tokens * plan.world.size / time.seconds
    table.add_row("step", *[""] * len(names), Text(f"{time.seconds:.3g}", style="bold"))
    table.caption = f"limited by {time.limit}; {rate:,.0f} tokens/s"
    table.caption_justify = "left"
    return table


def wear_line(plan: Plan) -> str:
    total = plan.traffic.total
    if not total.nvme_write:
        return "nothing is written to NVMe"
    moved = f"NVMe a step: {bytes_text(total.nvme_read)} read, {bytes_text(total.nvme_write)} written"
    return f"{moved}; a disk rated for 600 TB lasts {600e12 / total.nvme_write:,.0f} steps"


def placements_table(plans: list[Plan]) -> Table:
    """One line for each placement."""
    table = Table(box=None, pad_edge=False)
    for name, justify in (
        ("placement", "left"), ("device GiB", "right"), ("host GiB", "right"), ("nvme GiB", "right"), ("step s", "right"),
        ("limit", "left"), ("written GiB", "right"), ("", "left"),
    ):  # fmt: skip
        table.add_column(name, justify=justify)
    for place, plan in enumerate(plans):
        sizes = [f"{plan.memory.total(tier) / GIB:.2f}" for tier in (Tier.device, Tier.cpu, Tier.nvme)]
        short = ", ".join(f"{tier} short by {bytes_text(lack)}" for tier, lack in plan.short.items())
        wear = f"{plan.traffic.total.nvme_write / GIB:.2f}"
        row = (
            plan.placement,
            *sizes,
            f"{plan.time.seconds:.3g}",
            plan.time.limit,
            wear,
            short or ("chosen" if place == 0 else ""),
        )
        table.add_row(*row, style="dim" if short else "")
    return table


def against(plan: Plan, step_s: float, peak_bytes: dict[str, int]) -> str:
    """Plan and measurement in one line. peak_bytes: host_rss, device, nvme, as `Engine.peak_bytes` gives them."""
    parts = [_pair("step", plan.time.seconds, step_s, "s")]
    for tier, name, key in (
        (Tier.device, "device", "device"),
        (Tier.cpu, "host", "host_rss"),
        (Tier.nvme, "nvme", "nvme"),
    ):
        planned, measured = plan.memory.total(tier), peak_bytes[key]
        if planned or measured:
            parts.append(_pair(name, planned / GIB, measured / GIB, "GiB"))
    return "planned and measured: " + "; ".join(parts)


def _pair(name: str, planned: float, measured: float, unit: str) -> str:
    off = f" ({planned / measured - 1:+.0%})" if measured else ""
    return f"{name} {planned:.3g} and {measured:.3g} {unit}{off}"
