"""Finders of faults: random calls of every public name, damaged files, killed commands. See CONTRIBUTING.md."""
