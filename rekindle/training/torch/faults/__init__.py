"""Classify the errors of a step, and repair a rank in its process."""
