"""The snapshots that an agent keeps, their copies on other nodes, and checkpoints of them."""
