"""TRL's SFTTrainer in float32 on rows of exactly the benchmark's tokens; a step's time from its callbacks."""

from __future__ import annotations

import contextlib
import sys
import time

import torch
from common import arguments, disk_bytes, micro_batches, say


def main() -> None:
    options = arguments()
    with contextlib.redirect_stdout(sys.stderr):
        import datasets
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
        from trl import SFTConfig, SFTTrainer

        datasets.disable_progress_bars()
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        inner = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
        inner.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
        )
        total = options.warmup + options.steps
        rows = [batch["input_ids"][0].tolist() for batch in micro_batches(options)] * total
        data = datasets.Dataset.from_dict({"input_ids": rows})
        settings = SFTConfig(
            output_dir=str(options.work / "trl"), max_steps=total, per_device_train_batch_size=1, max_length=options.tokens,
            gradient_accumulation_steps=options.micro_batches, gradient_checkpointing=True, learning_rate=1e-5, bf16=False,
            logging_steps=1, save_strategy="no", report_to=[], max_grad_norm=1.0, disable_tqdm=True, shuffle_dataset=False,
            use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip

    class Timed(TrainerCallback):
        def on_step_begin(self, *_args, **_kwargs):
            self.before, self.started = disk_bytes(), time.perf_counter()

        def on_step_end(self, _args, state, *_rest, **_kwargs):
            seconds, after = time.perf_counter() - self.started, disk_bytes()
            moved, number = {name: after[name] - self.before[name] for name in after}, state.global_step - 1
            rows_out.append({"number": number, "warmup": number < options.warmup, "seconds": seconds, "disk": moved})

    rows_out: list[dict] = []
    with contextlib.redirect_stdout(sys.stderr):
        trainer = SFTTrainer(
            model=model, args=settings, train_dataset=data, processing_class=tokenizer, callbacks=[Timed()]
        )
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    say(
        event="ready",
        parameters=sum(p.numel() for p in model.parameters()),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
    )
    for row, loss in zip(rows_out, losses, strict=True):
        say(event="step", loss=loss, device=0, **row)


main()
