"""The experiments: the only floor that touches disk, screen, plots and configuration."""
