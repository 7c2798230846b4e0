"""The optimizer: update rules on record chunks, the global norm's partial sums, learning-rate schedules."""

from zft.optim.norm import NORM_BLOCK, sumsq_blocks
from zft.optim.rules import Hyper, Rule, Segments, make_rule
from zft.optim.schedules import lr_at

__all__ = ["NORM_BLOCK", "Hyper", "Rule", "Segments", "lr_at", "make_rule", "sumsq_blocks"]
