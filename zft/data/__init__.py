"""Data: files and Hub data sets → rows → rendered text → tokens with targets → packed or padded micro-batches."""

from zft.data.loader import Loader
from zft.data.options import DataOptions, Format, OnError, TrainOn, Truncate
from zft.data.prepare import Prepared, prepare
from zft.data.report import DataReport

__all__ = ["DataOptions", "DataReport", "Format", "Loader", "OnError", "Prepared", "TrainOn", "Truncate", "prepare"]
