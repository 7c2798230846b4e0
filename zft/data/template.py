"""The chat template of a run: where it comes from, what it can express, and one rendering of it."""

from __future__ import annotations

import re
from pathlib import Path

from zft.config import ZftError
from zft.data.errors import RowError, shorten

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + 'END' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def chatml(tokenizer) -> str:
    """ChatML for a base model. A turn ends with <|im_end|> where that is one token, else with EOS."""
    known = tokenizer.convert_tokens_to_ids("<|im_end|>")
    if known is not None and known != tokenizer.unk_token_id:
        return _CHATML.replace("END", "<|im_end|>")
    if not tokenizer.eos_token:
        raise ZftError("data_options.chat_template=chatml needs <|im_end|> or an EOS token, the tokenizer has neither")
    return _CHATML.replace("END", tokenizer.eos_token)


def resolve_template(tokenizer, option: str | None) -> tuple[str | dict[str, str] | None, str]:
    """(template, its name for messages); None when neither the option nor the tokenizer has one.

    `option`: chatml, the path of a template file, or a template itself.
    """
    if option is None:
        return tokenizer.chat_template, f"the chat template of {tokenizer.name_or_path or 'the tokenizer'}"
    if option == "chatml":
        return chatml(tokenizer), "the chat template chatml"
    if "{%" in option or "{{" in option:
        return option, "data_options.chat_template"
    try:
        return Path(option).read_text(encoding="utf-8"), f"the chat template {option}"
    except (OSError, UnicodeDecodeError) as error:
        raise ZftError(
            f"data_options.chat_template: {option!r} can't be read ({getattr(error, 'strerror', None) or error}); "
            "give chatml, a template file or a template"
        ) from error


class Template:
    """A compiled template with the tokenizer's special tokens. Raises ZftError when it doesn't compile."""

    def __init__(self, source: str | dict[str, str], name: str, special_tokens: dict) -> None:
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import _compile_jinja_template

        self.name = name
        self.special_tokens = special_tokens
        # some tokenizers carry two templates: one for conversations with tools
        named = source if isinstance(source, dict) else {"default": source}
        self.sources = {False: named.get("default"), True: named.get("tool_use", named.get("default"))}
        if not all(self.sources.values()):
            raise ZftError(f"{name} has no default among {', '.join(named)}; set data_options.chat_template")
        try:
            self.compiled = {key: _compile_jinja_template(text) for key, text in self.sources.items()}
        except TemplateError as error:
            raise ZftError(f"{name} is no valid Jinja template: {shorten(error, 120)}") from error

    def mentions(self, tools: bool, *words: str) -> bool:
        """Whether the template's source uses one of these names."""
        return any(re.search(rf"\b{word}\b", self.sources[tools]) for word in words)

    def tracks(self, tools: bool) -> bool:
        """Whether it marks the assistant's text with {% generation %}."""
        return re.search(r"\{%-?\s*generation\s*-?%\}", self.sources[tools]) is not None

    def render(self, messages: list[dict], tools: list[dict] | None, prompt: bool = False) -> str:
        """The text of `messages`; with `prompt`, followed by the opening of an answer. Raises RowError."""
        return self._run(self.compiled[bool(tools)].render, messages, tools, prompt)

    def render_tracked(self, messages: list[dict], tools: list[dict] | None) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the character ranges inside {% generation %}."""
        from transformers.utils.chat_template_utils import _render_with_assistant_indices

        def run(**context):
            return _render_with_assistant_indices(compiled_template=self.compiled[bool(tools)], **context)

        return self._run(run, messages, tools, False)

    def _run(self, render, messages: list[dict], tools: list[dict] | None, prompt: bool):
        from jinja2.exceptions import TemplateError

        try:
            return render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **self.special_tokens
            )
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
            roles = ",".join(message["role"] for message in messages)
            raise RowError("refused by the template", f"{self.name}: {shorten(error, 100)} (roles {roles})") from error
