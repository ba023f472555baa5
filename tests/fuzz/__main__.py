"""make fuzz: look for faults with random calls, damaged files and killed commands. Each prints how to repeat what it found."""

from __future__ import annotations

import argparse
import importlib
import sys
import time

import torch

DEFAULTS = {"calls": 2000, "damages": 100, "kills": 5}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    for name, number in DEFAULTS.items():
        parser.add_argument(f"--{name}", f"--{name.upper()}", type=int, help=f"how many; without any of these, {number}")
    parser.add_argument("--seed", "--SEED", type=int, default=0)
    parser.add_argument("--first", "--FIRST", type=int, default=0, help="the number of the first one, to repeat what was found")
    given = parser.parse_args()
    counts = {name: number for name in DEFAULTS if (number := getattr(given, name)) is not None} or DEFAULTS
    torch.set_num_threads(1)
    faults = 0
    for name, count in counts.items():
        started, finder = time.monotonic(), importlib.import_module(f"tests.fuzz.{name}")
        found = finder.run(count, given.seed, given.first)
        told = ", ".join(f"{number} {kind}" for kind, number in sorted(found.outcomes.items()))
        seconds = time.monotonic() - started
        print(f"{count} {name} with seed {given.seed}: {told}; {len(found.failures)} faults; {seconds:.0f} s", flush=True)
        faults += len(found.failures)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
