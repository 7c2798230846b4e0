"""Checkpoints to resume from, and folders that the Hub and transformers understand."""
