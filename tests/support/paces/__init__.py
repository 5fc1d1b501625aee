"""Simulated step times of ranks that become slow."""
