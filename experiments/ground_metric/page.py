"""The page."""

from pathlib import Path


def write_page(results: Path, likelihoods: str, training: str) -> Path:
    raise NotImplementedError
