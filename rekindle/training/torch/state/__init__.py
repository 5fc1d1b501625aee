"""A rank's training state: captured, moved between ranks, kept and restored."""
