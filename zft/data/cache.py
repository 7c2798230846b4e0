"""The key of a tokenized data set: everything that its tokens depend on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

from zft.data.options import DataOptions
from zft.data.sources import Source

_VERSION = 2  # raise it when rows, masks, stop tokens or the store's files change


def cache_key(
    sources: list[Source], options: DataOptions, tokenizer, template: str | dict[str, str] | None, limits: dict
) -> str | None:
    """Hash of content, tokenizer, template and settings; None when the content can't be known beforehand.

    `limits`: what else decides (seq_len, method, vocabulary size). Settings that only order or batch rows are left out.
    """
    contents = [source.content_hash(options) for source in sources]
    if any(content is None for content in contents):
        return None
    settings = asdict(options)
    for name in ("pack", "padding_free", "length_grouped", "num_workers", "eval_share", "streaming", "chat_template"):
        settings.pop(name)
    parts = [_VERSION, contents, settings, limits, template, _tokenizer_state(tokenizer)]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True, default=str).encode(), digest_size=20).hexdigest()


def _tokenizer_state(tokenizer) -> list:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        state = repr(tokenizer)
    else:
        # left over from earlier calls; every call sets its own
        backend.no_padding()
        backend.no_truncation()
        state = backend.to_str()
    return [type(tokenizer).__name__, hashlib.blake2b(state.encode()).hexdigest(), dict(tokenizer.special_tokens_map)]
