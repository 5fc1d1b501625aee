"""What an agent knows of the node's accelerators, and the reset of a device."""
