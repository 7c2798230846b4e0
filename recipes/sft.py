"""Supervised fine-tuning on conversations, instructions or plain text.

    zft run sft model=HuggingFaceTB/SmolLM2-135M-Instruct data=chats.jsonl

Features: every format that `zft preview` detects, assistant masks, packing, full fine-tuning of models that do not fit
(state on the GPU, in host memory or on NVMe), several ranks, evaluation, checkpoints, an export that transformers loads.

Errors (ZftError, exit status 2, nothing written): no such model or data, rows that can't be read or teach nothing, a
placement that doesn't fit.
"""

from __future__ import annotations

from rich.console import Console

from zft.api import Engine
from zft.checkpoint.names import base_model
from zft.config import RunConfig
from zft.data import prepare
from zft.dist import World
from zft.models.hub import cache_dir, resolve_model
from zft.models.load import embedding_rows, load_config
from zft.observe.trace import Trace
from zft.plan.choose import describe
from zft.train.about import keep_about
from zft.train.folder import RunFolder
from zft.train.loop import Job, Outcome, ended_early, evaluator, fit
from zft.train.samples import keep_samples
from zft.train.setup import (
    facts,
    keep_plan,
    make_loader,
    placed,
    planned_and_measured,
    run_tokenizer,
    structure,
    together,
    trained_numel,
)

CONFIG = "sft"
"""The file of configs/ that `zft run` composes for this recipe."""


def main(run: RunConfig, resume: bool = False) -> int:
    """Returns the exit status: 0, or 130 for a run that was asked to stop."""
    world = World.from_env(run.engine.compute_device, run.engine.shard_ranks, run.engine.timeout_s)
    say = print if world.is_main else lambda *_: None
    folder = RunFolder(run.out)

    with together(world):
        # data: all that can be wrong with it is known before a weight is read
        base = resolve_model(run.model)
        config = load_config(base, run.trust_remote_code)
        tokenizer = run_tokenizer(run, base)
        prepared = prepare(
            [vars(source) for source in run.data],
            tokenizer,
            run.data_options,
            seq_len=run.train.seq_len,
            seed=run.train.seed,
            method="sft",
            eval_data=[vars(source) for source in run.eval_data] or None,
            cache_dir=cache_dir() / "data",
            vocab_size=embedding_rows(config, tokenizer),
        )
        if world.is_main:
            Console().print(prepared.report.render())
        loader, total_steps = make_loader(prepared, run, world)

        # model: its structure only; and where its state will live
        model, source = structure(run, base, tokenizer, world)
        prepared.keep_apart(base_model(model))
        run, plan = placed(run, model, world, prepared.report)

    # engine: streams the weights to where they live
    trace = Trace()
    with folder.opened(run, resume, world), together(world):
        engine = Engine(model, run.engine, source, world, trace.add)
        if world.is_main:
            keep_about(run, model, prepared.report, total_steps)
        keep_plan(plan, folder)
    say(f"{trained_numel(model):,} parameters to train; {describe(run.engine)}; {total_steps} steps; {folder.path}")

    # train
    job = Job(run, engine, loader, world, folder, evaluator(prepared, run, world, engine))
    job.trace, job.stop_ids = trace, prepared.stop_ids
    outcome = fit(job, total_steps, resume)
    if outcome is not Outcome.finished:
        engine.close()
        return ended_early(job, outcome)

    # export
    if not folder.is_exported:
        say(f"exporting to {folder.export}")
        template = prepared.chat_template if isinstance(prepared.chat_template, str) else None
        options = {"chat_template": template, "stop_ids": prepared.stop_ids, "facts": facts(run, job.state)}
        engine.export(folder.export, base=base, tokenizer=tokenizer, **options)
    if plan is not None:
        say(planned_and_measured(plan, folder, engine.peak_bytes()))
    engine.close()
    keep_samples(run, base, prepared, tokenizer, world)
    say(f"done: {folder.export}")
    return 0
