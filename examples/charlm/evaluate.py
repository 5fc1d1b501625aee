"""Evaluate a checkpoint of charlm for the flow `retrain`: its loss on held-out text.

    python examples/charlm/evaluate.py --size tiny

The flow gives the folder of the checkpoint in REKINDLE_CHECKPOINT, and reads the metrics from the
file that REKINDLE_METRICS names. Output on stdout and stderr has no effect on them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from corpus import Windows, load
from model import GPT, SIZES
from train import RECIPES, VALIDATION_WINDOWS, evaluate


def trained(checkpoint: Path, size: str) -> GPT:
    """Return the model of a checkpoint. Raises CalledProcessError: the checkpoint is damaged."""
    step = json.loads((checkpoint / "manifest.json").read_text())["manifest"]["step"]
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder, "state.pt")
        export = ["checkpoints", "export", str(checkpoint.parent), str(state), "--step", str(step)]
        command = [sys.executable, "-m", "rekindle.cli.main", *export, "--format", "torch"]
        subprocess.run([*command, "--only", "model"], check=True)
        states = torch.load(state, weights_only=True)
    model = GPT(SIZES[size])
    model.load_state_dict(states["model"])
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="tiny", help="of the model")
    args = parser.parse_args()
    _, validation = (
        Windows(text, SIZES[args.size].block_size) for text in load(RECIPES[args.size].characters)
    )
    held_out = validation.batch(range(0, len(validation), len(validation) // VALIDATION_WINDOWS))
    model = trained(Path(os.environ["REKINDLE_CHECKPOINT"]), args.size)
    metrics = {"val_loss": evaluate(model, held_out, torch.device("cpu"))}
    Path(os.environ["REKINDLE_METRICS"]).write_text(json.dumps(metrics))
    print(f"validation loss {metrics['val_loss']:.4f}")


if __name__ == "__main__":
    main()
