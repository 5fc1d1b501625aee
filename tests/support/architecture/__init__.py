"""The parts of docs/architecture.md that come from the source, or are checked against a run."""
