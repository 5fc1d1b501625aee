"""What is wrong: faults, health events, stragglers."""
