"""The planner: shapes by config alone, what fits, which placement is chosen, refusals with numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from zft.compose import compose, options
from zft.config import Tier, ZftError
from zft.plan.choose import Plan, candidates, choose
from zft.plan.models import hub_id, known_models, shape_for
from zft.plan.rates import GIB, Rates, named
from zft.plan.shapes import planned_world

GPU = Rates(
    name="test", is_gpu=True, device_room=24 * GIB, host_room=64 * GIB, nvme_room=2000 * GIB, h2d=25e9, d2h=25e9, dram=60e9,
    nvme_read=6e9, nvme_write=5e9, update=48e9, matmul=((1, 80e12),),
)  # fmt: skip
CPU = replace(GPU, is_gpu=False, matmul=((256, 100e9), (1024, 200e9)))


def run_of(tmp_path: Path, *args: str):
    return compose("sft", ["model=HuggingFaceTB/SmolLM2-135M-Instruct", "data=a/b", *args], tmp_path)


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    return shape_for(run_of(tmp_path_factory.mktemp("run")), planned_world(1, None, "cuda"))


@pytest.mark.parametrize("model", known_models())
def test_shapes_have_the_published_number_of_parameters(tmp_path, model):
    run = compose("sft", [f"model={model}", "data=a/b"], tmp_path)
    assert shape_for(run, planned_world(1, None, "cuda")).numel == known_models()[model]["numel"]
    assert hub_id(known_models()[model]["alias"]) == model


def plans(run, shape, rates):
    world = planned_world(1, None, "cuda" if rates.is_gpu else "cpu")
    return [Plan(replace(run, engine=engine), shape, world, rates) for engine in candidates(run, rates)]


def test_every_placement_is_considered_on_a_gpu_and_memory_once_without(tmp_path, shape):
    assert len(plans(run_of(tmp_path), shape, GPU)) == 27
    assert len(plans(run_of(tmp_path), shape, CPU)) == 8
    assert len(plans(run_of(tmp_path, "engine.param_tier=cpu"), shape, GPU)) == 9


def test_room_decides(tmp_path, shape):
    """Everything on the device where it fits; else the state goes first to the host, then to the disk."""
    run, world = run_of(tmp_path), planned_world(1, None, "cuda")
    assert choose(run, shape, world, GPU).plan.config.state_tier is Tier.device
    small = replace(GPU, device_room=int(2.2 * GIB))
    chosen = choose(run, shape, world, small).plan
    assert chosen.fits and chosen.memory.total(Tier.device) <= small.device_room
    assert chosen.config.state_tier is not Tier.device
    tight = replace(small, host_room=int(2.4 * GIB))
    assert choose(run, shape, world, tight).plan.memory.total(Tier.nvme) > 0


def test_the_chosen_one_is_the_fastest_that_fits(tmp_path, shape):
    run, world = run_of(tmp_path), planned_world(1, None, "cuda")
    for room in (3, 4, 24):
        rates = replace(GPU, device_room=room * GIB)
        fitting = [plan.time.seconds for plan in plans(run, shape, rates) if plan.fits]
        assert choose(run, shape, world, rates).plan.time.seconds <= min(fitting) * 1.03


def test_a_refusal_has_numbers_and_a_way_out(tmp_path, shape):
    run, world = run_of(tmp_path, "train.seq_len=8192"), planned_world(1, None, "cuda")
    rates = replace(GPU, device_room=int(1.9 * GIB), host_room=64 * GIB)
    with pytest.raises(ZftError, match=r"does not fit: .* of 1\.90 GiB \(short by .* would fit") as caught:
        choose(run, shape, world, rates, shape_for)
    assert "\n" not in str(caught.value)
    with pytest.raises(ZftError, match="no setting known to zft would fit"):
        choose(run, shape, world, replace(rates, device_room=GIB // 4), shape_for)


def test_the_way_out_fits(tmp_path, shape):
    """The advice, typed in, is accepted."""
    world = planned_world(1, None, "cuda")
    rates = replace(GPU, device_room=int(1.9 * GIB))
    with pytest.raises(ZftError) as caught:
        choose(run_of(tmp_path, "train.seq_len=8192"), shape, world, rates, shape_for)
    advice = str(caught.value).rpartition(";")[2].removesuffix(" would fit").split()
    changed = run_of(tmp_path, *([] if any("seq_len" in a for a in advice) else ["train.seq_len=8192"]), *advice)
    assert choose(changed, shape_for(changed, world), world, rates).plan.fits


def test_memory_follows_the_tiers(tmp_path, shape):
    """12 bytes of record a parameter and 2 of gradient, on the tier that the config names; nothing grows elsewhere."""
    for engine, tier in (("zero3_cpu", Tier.cpu), ("zero3_nvme", Tier.nvme)):
        plan = plans(run_of(tmp_path, f"engine={engine}"), shape, GPU)[0]
        records = sum(plan.memory.host.get(item, 0) + plan.memory.nvme.get(item, 0)
                      for item in ("weights", "optimizer state", "gradients"))  # fmt: skip
        assert records == pytest.approx(14 * shape.numel, rel=0.01)
        assert plan.memory.total(tier) >= records
        assert "optimizer state" not in plan.memory.device


def test_nvme_keeps_memory_flat_in_the_number_of_layers(tmp_path):
    world, totals = planned_world(1, None, "cpu"), []
    for model in ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B"):
        run = run_of(
            tmp_path, f"model={model}", "engine=zero3_nvme", "activation=offload", "engine.activation_tier=nvme"
        )
        plan = Plan(run, shape_for(run, world), world, CPU)
        totals.append(plan.memory.total(Tier.cpu))
    assert totals[1] < 3 * totals[0], "eight times the parameters, twice the width"


def test_time_has_the_limit_that_is_slow(tmp_path, shape):
    run = run_of(tmp_path, "engine=zero3_nvme")
    world = planned_world(1, None, "cuda")
    slow_disk = replace(GPU, nvme_read=1e8, nvme_write=1e8)
    assert Plan(run, shape, world, slow_disk).time.limit == "nvme"
    slow_bus = replace(GPU, h2d=1e7, d2h=1e7)
    assert Plan(run, shape, world, slow_bus).time.limit in ("h2d", "d2h")
    slow_gpu = replace(GPU, matmul=((1, 1e10),))
    assert Plan(run, shape, world, slow_gpu).time.limit == "compute"
    fast, slow = Plan(run, shape, world, GPU).time.seconds, Plan(run, shape, world, slow_disk).time.seconds
    assert slow > fast


def test_rates_between_widths_are_interpolated():
    assert CPU.flops(128) == 100e9 and CPU.flops(4096) == 200e9
    assert CPU.flops(512) == pytest.approx(150e9)
    assert CPU.shared(2).flops(4096) == 100e9 and CPU.shared(2).host_room == 32 * GIB


@pytest.mark.parametrize("hardware", [name for name in options("hardware") if name != "this"])
def test_every_preset_is_a_whole_machine(tmp_path, hardware):
    rates = named(run_of(tmp_path, f"hardware={hardware}").hardware, CPU)
    assert rates.is_gpu and rates.name == hardware
    assert rates.device_room > 20 * GIB and rates.host_room > 50 * GIB and rates.nvme_room > 1000 * GIB
    assert rates.flops(4096) > 30e12 and rates.h2d >= 25e9 and rates.nvme_read > 1e9


@pytest.mark.parametrize("experiment", options("experiment"))
def test_every_experiment_fits_its_machine(tmp_path, experiment):
    run = compose("sft", [f"experiment={experiment}", "data=a/b"], tmp_path)
    known = next(
        (key for key in known_models() if key == run.model or key == run.model.removesuffix("-Instruct")), None
    )
    assert known, f"{run.model} is not in zft/plan/models.yaml"
    run = replace(run, model=known)
    world = planned_world(1, None, "cpu" if run.hardware.name == "this" else "cuda")
    rates = named(run.hardware, CPU)
    assert choose(run, shape_for(run, world), world, rates, shape_for).plan.fits


def test_the_json_object_is_plain(tmp_path, shape):
    made = json.loads(
        json.dumps(Plan(run_of(tmp_path, "engine=zero3_nvme"), shape, planned_world(1, None, "cuda"), GPU).to_dict())
    )
    assert {"peak_device_bytes", "peak_host_bytes", "nvme_bytes", "step_s", "limit", "placement"} <= set(made)
    assert made["nvme_wear_bytes"] == made["traffic_bytes"]["nvme_write"] > 0
