"""The version of what is installed; the source does not repeat it."""

from __future__ import annotations

from importlib import metadata


def installed() -> str:
    """Half a millisecond on import: a lazy ``__getattr__`` of the package would have type checkers believe any name of it."""
    try:
        return metadata.version("wassersmooth")
    except metadata.PackageNotFoundError:
        return "unknown"


__version__ = installed()
