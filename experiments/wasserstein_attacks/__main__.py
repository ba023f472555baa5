"""``python -m experiments.wasserstein_attacks``."""

from __future__ import annotations

import sys

from experiments.wasserstein_attacks.commands import PROGRAM
from wassersmooth.cli import main

if __name__ == "__main__":
    sys.exit(main(program=PROGRAM))
