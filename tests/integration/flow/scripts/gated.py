"""A script without Rekindle: waits for a file, and then ends as its last argument specifies."""

import sys
import time
from pathlib import Path

gate, end = Path(sys.argv[1]), sys.argv[2]
while not gate.exists():
    time.sleep(0.02)
if end == "raise":
    raise ValueError("shard 7 is damaged")
