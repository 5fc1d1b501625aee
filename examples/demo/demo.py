"""Train a small model twice: undisturbed, and with a lost rank, node and flow process.

    .venv/bin/python examples/demo/demo.py

It ends with the proof that both runs have the same result, bit for bit, or with exit status 1.
"""

from __future__ import annotations

import argparse
import signal
import sys

import place


def main() -> int:
    """Run the demo; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--size", default="tiny", help="of the model, see examples/charlm/model.py")
    parser.add_argument("--batch-size", type=int, default=8, help="samples per rank and step")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    # A signal also ends the processes that the demo has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    place.empty_output()
    place.set_environment()
    # Not before: Prefect reads its settings, and makes its folder, when it is imported.
    from story import play
    from verdict import Plan

    try:
        return 0 if play(Plan(**vars(options))) else 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
