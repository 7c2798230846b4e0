"""Conversations → rendered text with the character ranges that are targets.

A conversation is rendered once. Its targets come from the template's {% generation %} marks, or else from prefixes: the
answer of turn i begins where `render(turns before i, with the opening of an answer)` ends, and ends where
`render(turns up to i)` does. Both have to be prefixes of the whole.

[Note: rewritten turns] Some templates show an earlier turn otherwise than it was generated (Qwen 3 leaves out its
thinking). Such a turn is trained in a sequence of its own, rendered up to and including it, as it is at inference.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from zft.config import ZftError
from zft.data.adapt import adapt
from zft.data.errors import RowError
from zft.data.formats import Example
from zft.data.options import DataOptions, TrainOn
from zft.data.template import Template, resolve_template


@dataclass
class Rendering:
    """A text to tokenize, and the character ranges [start, end) of it that are targets."""

    text: str
    spans: list[tuple[int, int]]
    where: str
    plain: bool = False  # no template: the tokenizer adds its own BOS, and EOS is appended
    begins: bool = True
    ends: bool = True
    document: bool = False


@dataclass
class Renderer:
    """Renders examples with one template. `notes` counts what was done to rows by rule."""

    tokenizer: object
    options: DataOptions
    notes: Counter = field(default_factory=Counter)

    def __post_init__(self) -> None:
        source, self.name = resolve_template(self.tokenizer, self.options.chat_template)
        self.source = source
        special = {k: v for k, v in self.tokenizer.special_tokens_map.items() if isinstance(v, str)}
        self.template = Template(source, self.name, special) if source else None
        tokens = {t.content for t in self.tokenizer.added_tokens_decoder.values() if t.special}
        tokens |= {str(token) for token in self.tokenizer.all_special_tokens}
        self.specials = sorted((t for t in tokens if t), key=len, reverse=True)
        self._special_re = re.compile("|".join(map(re.escape, self.specials)) or r"(?!)")

    def render(self, example: Example) -> list[Rendering]:
        """One rendering, or several where the template rewrites earlier turns. Raises RowError for this row."""
        if example.turns is None:
            text = example.prompt + example.text
            start = 0 if self.options.train_on is TrainOn.all else len(example.prompt)
            return [Rendering(text, [(start, len(text))], example.where, plain=True, begins=example.begins,
                              ends=example.ends, document=example.document)]  # fmt: skip
        if self.template is None:
            raise ZftError(
                f"{self.tokenizer.name_or_path or 'the tokenizer'} has no chat template; "
                "set data_options.chat_template=chatml or the path of a template"
            )
        if example.turns.trailing:
            self.notes["rows: turns after the last answer left out"] += 1
        messages, tools = adapt(example, self.template, self.options.fold_system, self.notes)
        full = self.template.render(messages, tools)
        if self.options.train_on is TrainOn.all:
            return [Rendering(full, [(0, len(full))], example.where)]
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
        before = example.turns
        flags = [t for m, t in zip(before.messages, before.trained, strict=True) if m["role"] == "assistant"]
        wanted = [turn for turn, trained in zip(turns, flags, strict=True) if trained]
        if self.options.train_on is TrainOn.last:
            wanted = [i for i in wanted if i == turns[-1]]
        if self.template.tracks(bool(tools)):
            return [self._tracked(messages, tools, turns, wanted, example.where)]
        return self._by_prefix(messages, tools, wanted, full, example.where)

    # --- targets

    def _tracked(self, messages, tools, turns: list[int], wanted: list[int], where: str) -> Rendering:
        text, spans = self.template.render_tracked(messages, tools)
        spans = [(start, end) for start, end in spans if end > start]
        if not spans:
            raise RowError("nothing marked", f"{self.name} marks no text with {{% generation %}}")
        if wanted != turns:
            if len(spans) != len(turns):
                raise RowError("unclear turns", f"{self.name} marks {len(spans)} ranges for {len(turns)} answers")
            spans = [span for turn, span in zip(turns, spans, strict=True) if turn in wanted]
        return Rendering(text, [(s, self._with_end(text, e)) for s, e in spans], where)

    def _with_end(self, text: str, end: int) -> int:
        """A marked range that stops short of the end-of-turn token takes it in: the model has to learn to stop."""
        if self._ends_special(text, len(text[:end].rstrip())):
            return end
        follows = self._special_re.match(text, end)
        return follows.end() if follows else end

    def _by_prefix(self, messages, tools, wanted: list[int], full: str, where: str) -> list[Rendering]:
        out, upto, pending = [], len(messages), list(wanted)
        while True:
            spans, rewritten = [], []
            for turn in pending:
                span = self._span(messages[:upto], tools, turn, full)
                spans.append(span) if span else rewritten.append(turn)
            if spans:
                out.append(Rendering(full, spans, where))
            if not rewritten:
                return out or [Rendering(full, [], where)]
            if rewritten[-1] + 1 == upto:
                raise RowError(
                    "no answer range",
                    f"{self.name} can't be masked: its prompt for turn {rewritten[-1] + 1} is no prefix of the "
                    "conversation; mark the answers with {% generation %} or set data_options.chat_template",
                )
            # [Note: rewritten turns]
            self.notes["sequences added for turns that the template rewrites later"] += 1
            upto, pending = rewritten[-1] + 1, rewritten
            full = self.template.render(messages[:upto], tools)

    def _span(self, messages: list[dict], tools, turn: int, full: str) -> tuple[int, int] | None:
        """Where `full` shows the answer of `turn` as it was generated; None when it shows something else."""
        prompt = self.template.render(messages[:turn], tools, prompt=True)
        if not full.startswith(prompt):
            return None
        start = len(prompt)
        if turn + 1 == len(messages):
            return start, self._trim(full, start, len(full))
        done = self.template.render(messages[: turn + 1], tools)
        end = self._border(done, full)
        if end < start or self._special_re.sub("", done[end:]).strip():
            return None
        trimmed = self._trim(full, start, end)
        # the end of turn may stand only at the end of the conversation: then `full` doesn't show it
        if self._ends_special(done, len(done.rstrip())) and not self._ends_special(full, trimmed):
            return None
        return start, trimmed

    def _border(self, done: str, full: str) -> int:
        """Length of the common prefix, not ending inside a special token."""
        end = _common_prefix(done, full)
        longest = len(self.specials[0]) if self.specials else 0
        for text in (done, full):
            for match in self._special_re.finditer(text, max(0, end - longest)):
                if match.start() >= end:
                    break
                if match.end() > end:
                    end = match.start()
        return end

    def _trim(self, text: str, start: int, end: int) -> int:
        """Leave out white space that a template writes after the end-of-turn token: it is never generated."""
        stripped = start + len(text[start:end].rstrip())
        return stripped if self._ends_special(text, stripped) else end

    def _ends_special(self, text: str, end: int) -> bool:
        return any(text.endswith(token, 0, end) for token in self.specials)

    def ends_turn(self, rendering: Rendering) -> bool:
        """Whether the last target of the rendering is an end-of-turn token."""
        if not rendering.spans:
            return False
        end = rendering.spans[-1][1]  # a marked range may take in the white space that follows the token
        return self._ends_special(rendering.text, len(rendering.text[:end].rstrip()))


def _common_prefix(a: str, b: str) -> int:
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low
