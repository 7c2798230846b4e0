"""The verbs of the command `zft`, one file each: `add(app)` registers it."""
