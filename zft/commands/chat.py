"""`zft chat FOLDER`: talk to an exported model with plain transformers."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from zft.config import ZftError
from zft.train.folder import RunFolder


def add(app: typer.Typer) -> None:
    app.command("chat", help="Talk to an exported model, or ask it one thing with --prompt.")(chat)


def chat(
    folder: str = typer.Argument(help="Exported folder, run folder or Hub id."),
    prompt: str = typer.Option(None, help="Answer this and end."),
    max_new_tokens: int = typer.Option(256, min=1, help="Longest answer, in tokens."),
    trust_remote_code: bool = typer.Option(False, "--trust-remote-code", help="Run code that comes with the model."),
) -> None:
    name = _model_folder(folder)
    answer = _load(name, max_new_tokens, trust_remote_code)
    if prompt is not None:
        answer([{"role": "user", "content": prompt}])
        return
    print("An empty line or Ctrl-D ends.")
    messages: list[dict[str, str]] = []
    while text := _ask():
        messages.append({"role": "user", "content": text})
        messages.append({"role": "assistant", "content": answer(messages)})


def _model_folder(name: str) -> str:
    path = Path(name).expanduser()
    run = RunFolder(path)
    if run.is_run:
        if not run.is_exported:
            raise ZftError(f"{name} has no export yet; `zft resume {name}` completes the run")
        return str(run.export)
    from zft.models.hub import resolve_model

    return str(resolve_model(name))


def _load(name: str, max_new_tokens: int, trust_remote_code: bool):
    """A function from messages to the model's answer, which it prints as it comes."""
    from transformers import TextStreamer

    from zft.models.answers import answer_ids, load_plain
    from zft.models.load import load_tokenizer

    tokenizer, model = load_tokenizer(name, trust_remote_code), load_plain(name, trust_remote_code)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)

    def answer(messages: list[dict[str, str]]) -> str:
        if tokenizer.chat_template:
            given = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )  # fmt: skip
        else:
            given = tokenizer("\n".join(message["content"] for message in messages), return_tensors="pt")
        made = answer_ids(model, given["input_ids"], max_new_tokens, streamer=streamer)
        return tokenizer.decode(made, skip_special_tokens=True)

    return answer


def _ask() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""
