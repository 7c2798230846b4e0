"""Hugging Face causal LMs: found, built on meta, streamed, and their loss."""
