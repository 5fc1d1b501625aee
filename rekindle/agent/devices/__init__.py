"""The accelerators of a node: their state, and the reset of a device."""
