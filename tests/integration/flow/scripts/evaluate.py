"""Evaluates a checkpoint: counts its calls, and prints the metric of a file."""

import json
import os
import sys
from pathlib import Path

calls, accuracy = Path(sys.argv[1]), float(Path(sys.argv[2]).read_text())
calls.write_text(calls.read_text() + "e" if calls.exists() else "e")
assert Path(os.environ["REKINDLE_CHECKPOINT"], "manifest.json").exists()
print("evaluating")
print(json.dumps({"accuracy": accuracy}))
