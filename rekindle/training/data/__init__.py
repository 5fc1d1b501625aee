"""The order of samples, for any world size; without a framework."""
