"""``python -m experiments.practice``."""

from __future__ import annotations

import sys

from experiments.practice.commands import PROGRAM
from wassersmooth.cli import main

if __name__ == "__main__":
    sys.exit(main(program=PROGRAM))
