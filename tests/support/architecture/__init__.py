"""The parts of docs/architecture.md that come from the source, or that tests compare with a run."""
