"""Check a node's devices: a product of matrices, copies in memory, collectives."""
