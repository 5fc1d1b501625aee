"""Simulate a policy: the real decisions on faults drawn from published statistics.

This package may import recovery. It may not import Prefect, job, agent or training. Everything
except file input and output is a pure function of its arguments and a seed. Only the module that
draws the plot imports matplotlib.
"""
