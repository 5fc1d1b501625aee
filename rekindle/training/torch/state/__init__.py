"""Capture a rank's training state, move it between ranks, keep it and restore it."""
