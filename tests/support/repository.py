"""Where the repository and the tests' packages are, for tests in any folder."""

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]
