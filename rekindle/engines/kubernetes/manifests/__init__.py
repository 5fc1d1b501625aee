"""Render the objects of a job without a cluster."""
