"""The order of samples, for any world size; no framework."""
