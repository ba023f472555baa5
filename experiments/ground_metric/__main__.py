"""``python -m experiments.ground_metric``."""

from __future__ import annotations

import sys

from experiments.ground_metric.commands import PROGRAM
from wassersmooth.cli import main

if __name__ == "__main__":
    sys.exit(main(program=PROGRAM))
