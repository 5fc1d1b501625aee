"""A drawing of a run over time."""
