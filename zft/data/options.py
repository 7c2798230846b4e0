"""The keys of `data_options.*`. They live in zft/config.py with every other key of the command line."""

from zft.config import DataOptions, Format, OnError, TrainOn, Truncate

__all__ = ["DataOptions", "Format", "OnError", "TrainOn", "Truncate"]
