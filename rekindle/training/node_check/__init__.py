"""What a node check does on a device: a product of matrices, copies in memory, collectives."""
