"""The planner: bytes on every tier, traffic and time of a step, from config and shapes alone."""
