"""Which base model a checkpoint belongs to, where it does not hold the frozen weights itself."""

from __future__ import annotations

from pathlib import Path

import xxhash

SAMPLES = 64
SAMPLE_BYTES = 64 << 10


def fingerprint(folder: str | Path | None) -> dict[str, str]:
    """{safetensors file: hash of its size, its head and samples from all over it}; {} where there are none.

    Samples tell models of the same shape apart without reading them whole: training changes weights everywhere.
    """
    if folder is None:
        return {}
    return {path.name: _sampled(path) for path in sorted(Path(folder).glob("*.safetensors"))}


def base_differs(then: dict[str, str], now: dict[str, str]) -> str | None:
    """The first file that differs; None if none does, or one of the two is not known."""
    if not then or not now:
        return None
    return next((name for name in sorted(then.keys() | now.keys()) if then.get(name) != now.get(name)), None)


def _sampled(path: Path) -> str:
    size = path.stat().st_size
    digest = xxhash.xxh3_128(str(size).encode())
    with path.open("rb", buffering=0) as file:
        for number in range(SAMPLES):
            file.seek(number * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
