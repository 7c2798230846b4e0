"""zft fine-tunes Hugging Face causal LMs that do not fit. `Engine` is imported on first use: it needs torch."""

from zft.config import SGD, AdamW, EngineConfig, Lion, ZftError

__version__ = "0.1.0"
__all__ = ["SGD", "AdamW", "Engine", "EngineConfig", "Lion", "ZftError", "__version__"]


def __getattr__(name: str):
    if name == "Engine":
        from zft.api import Engine

        return Engine
    raise AttributeError(f"module 'zft' has no attribute {name!r}")
