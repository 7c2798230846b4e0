"""What a single row can have wrong, before it becomes the user's one-line error or a count."""

from __future__ import annotations


class RowError(Exception):
    """A bad row. `kind` is the short reason it is counted under, `detail` what to tell about this one."""

    def __init__(self, kind: str, detail: str = "", fatal: bool = False) -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind
        self.detail = detail
        self.fatal = fatal  # nothing after it can be read, so on_error=skip doesn't apply

    def __reduce__(self):
        return (RowError, (self.kind, self.detail, self.fatal))


class RowDropped(Exception):
    """A row that is left out by rule and not by mistake, such as an answer labelled bad."""


def shorten(value: object, limit: int = 60) -> str:
    """A value for an error message, on one line and of bounded length."""
    text = " ".join(str(value).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
