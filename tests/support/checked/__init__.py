"""Nodes that are checked: simulated ones, and the trouble that real checkers are put to."""
