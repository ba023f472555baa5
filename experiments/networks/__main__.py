"""``python -m experiments.networks``."""

from __future__ import annotations

import sys

from experiments.networks.commands import PROGRAM
from wassersmooth.cli import main

if __name__ == "__main__":
    sys.exit(main(program=PROGRAM))
