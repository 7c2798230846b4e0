"""A .json file value by value: an array of rows, JSON lines under the wrong suffix, or one object with a list in it."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import BinaryIO

from zft.data.errors import RowError

_CHUNK = 1 << 18
_SPACE = " \t\r\n"


class _Buffer:
    """The unread part of a file as text, and the line it begins at."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.text, self.pos, self.line, self.ended = "", 0, 1, False

    def more(self) -> bool:
        """Read on; False at the end of the file. The chunk grows with the value, so a long value costs O(length)."""
        if self.ended:
            return False
        data = self.file.read(max(_CHUNK, len(self.text) - self.pos))
        self.ended = not data
        self.text = self.text[self.pos :] + self.decoder.decode(data, final=self.ended)
        self.pos = 0
        return True

    def advance(self, end: int) -> None:
        self.line += self.text.count("\n", self.pos, end)
        self.pos = end

    def peek(self) -> str:
        """The next character that isn't white space, '' at the end."""
        while True:
            end = self.pos
            while end < len(self.text) and self.text[end] in _SPACE:
                end += 1
            self.advance(end)
            if end < len(self.text):
                return self.text[end]
            if not self.more():
                return ""


_DECODER = json.JSONDecoder()


def _value(buffer: _Buffer) -> object:
    while True:
        try:
            value, end = _DECODER.raw_decode(buffer.text, buffer.pos)
        except json.JSONDecodeError:
            if not buffer.more():
                raise
            continue
        # a number at the end of the buffer may go on in the next chunk; objects, arrays and strings can't
        if end == len(buffer.text) and not isinstance(value, dict | list | str) and buffer.more():
            continue
        buffer.advance(end)
        return value


def iter_json(file: BinaryIO) -> Iterator[tuple[int, int, object]]:
    """(row number from 1, line, value) for each row; a last value that is a RowError says where the file breaks."""
    buffer, number, line = _Buffer(file), 0, 1
    try:
        array = buffer.peek() == "["
        if array:
            buffer.advance(buffer.pos + 1)
        while (char := buffer.peek()) and not (array and char == "]"):
            line, number = buffer.line, number + 1
            value = _value(buffer)
            follows = buffer.peek()
            if not array:
                yield from _objects(value, number, line, alone=number == 1 and not follows)
                continue
            if follows not in (",", "]"):
                kind = f"expected ',' or ']' but got {follows!r}" if follows else "the file ends inside the array"
                yield number, line, value
                yield number + 1, buffer.line, RowError("broken JSON", kind, fatal=True)
                return
            yield number, line, value
            if follows == ",":
                buffer.advance(buffer.pos + 1)
        if array and not char:
            yield number + 1, buffer.line, RowError("broken JSON", "the file ends inside the array", fatal=True)
    except UnicodeDecodeError as error:
        yield number + 1, buffer.line, RowError("not UTF-8", f"{error.reason} after this line", fatal=True)
    except json.JSONDecodeError as error:
        at = buffer.line + buffer.text.count("\n", buffer.pos, error.pos)
        yield number, at, RowError("broken JSON", error.msg, fatal=True)
    except RecursionError:
        yield number, line, RowError("broken JSON", "nested too deeply", fatal=True)


def _objects(value: object, number: int, line: int, alone: bool) -> Iterator[tuple[int, int, object]]:
    """A lone object such as {"data": [rows]} holds its rows in its only list of objects."""
    if alone and isinstance(value, dict):
        lists = [v for v in value.values() if isinstance(v, list) and v and all(isinstance(x, dict) for x in v)]
        is_row = any(key in value for key in ("messages", "conversations", "chosen", "history"))
        if len(lists) == 1 and not is_row:
            for index, row in enumerate(lists[0], 1):
                yield index, line, row
            return
    yield number, line, value
