"""The snapshots that an agent keeps, their copies on neighbours, and checkpoints of them."""
