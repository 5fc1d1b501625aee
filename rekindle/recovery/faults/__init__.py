"""Define faults, health events and stragglers."""
