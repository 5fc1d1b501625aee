"""Simulated nodes for the node checks, and faults for real checkers."""
