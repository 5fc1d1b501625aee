"""The command line of `rekindle simulate`; it imports nothing, for --help is not to wait."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--policy", type=Path, required=True, help="its YAML file")
    parser.add_argument("--compare", type=Path, metavar="POLICY", help="another, same faults")
    world = parser.add_argument_group("world")
    world.add_argument("--nodes", type=int, required=True, help="nodes that train")
    world.add_argument("--devices-per-node", type=int, default=8, help="default: 8")
    world.add_argument("--spares", type=int, help="nodes in reserve; default: as many as it takes")
    world.add_argument("--min-nodes", type=int, default=0, help="least to go on with; 0: all")
    faults = parser.add_argument_group("faults")
    faults.add_argument(
        "--faults",
        default="llama3",
        metavar="MIX|FILE",
        help="llama3 (the default), rsc1, rsc2, byterobust, or a file of your own",
    )
    faults.add_argument("--times", type=Path, metavar="FILE", help="what recovering takes")
    faults.add_argument(
        "--checkpoint-every", type=float, metavar="SECONDS", help="default: the best interval"
    )
    runs = parser.add_argument_group("runs")
    runs.add_argument("--days", type=float, default=30.0, help="length of a run; default: 30")
    runs.add_argument("--runs", type=int, default=20, help="default: 20")
    runs.add_argument("--seed", type=int, default=0, help="the same seed draws the same faults")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the answer there as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it there")
