"""`python -m zft` is the command `zft` (torchrun starts it so)."""

from zft.cli import entry

entry()
