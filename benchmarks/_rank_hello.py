"""A rank that only records its start: it writes the time to FOLDER/<rank>, and ends."""

import os
import sys
import time
from pathlib import Path

Path(sys.argv[1], os.environ["RANK"]).write_text(repr(time.time()))
