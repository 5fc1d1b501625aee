"""Draw a run over time."""
