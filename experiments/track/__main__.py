"""``python -m experiments.track``."""

from __future__ import annotations

import sys

from experiments.track.commands import PROGRAM
from wassersmooth.cli import main

if __name__ == "__main__":
    sys.exit(main(program=PROGRAM))
