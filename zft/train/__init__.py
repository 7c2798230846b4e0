"""The run around the engine: its folder, its resumable state and the loop."""
