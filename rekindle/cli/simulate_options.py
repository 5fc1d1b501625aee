"""The options of `rekindle simulate`, as rows."""

from __future__ import annotations

from pathlib import Path

from rekindle.cli.command_line import Group, argument

SIMULATE = (
    argument("--policy", type=Path, required=True, help="its YAML file"),
    argument("--compare", type=Path, metavar="POLICY", help="another, same faults"),
    Group(
        "world",
        (
            argument("--nodes", type=int, required=True, help="nodes that train"),
            argument("--devices-per-node", type=int, default=8, help="default: 8"),
            argument("--spares", type=int, help="nodes in reserve; default: as many as it takes"),
            argument("--min-nodes", type=int, default=0, help="least to go on with; 0: all"),
        ),
    ),
    Group(
        "faults",
        (
            argument(
                "--faults",
                default="llama3",
                metavar="MIX|FILE",
                help="llama3 (the default), rsc1, rsc2, byterobust, or a file of your own",
            ),
            argument("--times", type=Path, metavar="FILE", help="what recovering takes"),
            argument(
                "--checkpoint-every",
                type=float,
                metavar="SECONDS",
                help="default: the best interval",
            ),
        ),
    ),
    Group(
        "runs",
        (
            argument("--days", type=float, default=30.0, help="length of a run; default: 30"),
            argument("--runs", type=int, default=20, help="default: 20"),
            argument("--seed", type=int, default=0, help="the same seed draws the same faults"),
        ),
    ),
    argument("--json", type=Path, metavar="FILE", help="write the answer there as JSON"),
    argument("--plot", type=Path, metavar="FILE.png", help="draw it there"),
)
