"""Read and write checkpoints of other formats."""
