"""The command line of `rekindle simulate`; it imports nothing, for --help is not to wait."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--policy", type=Path, metavar="FILE", required=True, help="the policy, as YAML"
    )
    parser.add_argument(
        "--compare", type=Path, metavar="FILE", help="another policy, which meets the same faults"
    )
    world = parser.add_argument_group("world")
    world.add_argument("--nodes", type=int, required=True, metavar="NODES", help="nodes that train")
    world.add_argument(
        "--devices-per-node", type=int, default=8, metavar="DEVICES", help="devices of each node"
    )
    world.add_argument(
        "--spares",
        type=int,
        metavar="NODES",
        help="number of spare nodes; default: without a limit",
    )
    world.add_argument(
        "--min-nodes",
        type=int,
        default=0,
        metavar="NODES",
        help="fewest nodes with which training continues; 0: all",
    )
    faults = parser.add_argument_group("faults")
    faults.add_argument(
        "--faults",
        default="llama3",
        metavar="MIX|FILE",
        help="fault statistics: llama3, rsc1, rsc2, byterobust, or a file of your own",
    )
    faults.add_argument(
        "--times",
        type=Path,
        metavar="FILE",
        help="durations of recoveries, as TOML; default: measured ones",
    )
    faults.add_argument(
        "--checkpoint-every",
        type=float,
        metavar="SECONDS",
        help="time between two checkpoints; default: the best one",
    )
    runs = parser.add_argument_group("runs")
    runs.add_argument("--days", type=float, default=30.0, metavar="DAYS", help="length of a run")
    runs.add_argument(
        "--runs", type=int, default=20, metavar="RUNS", help="number of simulated runs"
    )
    runs.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="SEED",
        help="seed of the faults; the same seed draws the same faults",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="write a plot of the result")
