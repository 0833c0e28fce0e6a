"""Writes the bundles of the tests into a folder: `python tests/make_bundle.py DIR`, for a run without PyTorch."""

import sys
from pathlib import Path

from bundles import write_bundles

if __name__ == "__main__":
    write_bundles(Path(sys.argv[1]))
