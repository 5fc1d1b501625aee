"""Implement the command line: parse commands, and print results.

Other packages do the work. This package may import all of them except coordinator.
"""
