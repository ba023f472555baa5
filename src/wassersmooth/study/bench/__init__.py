"""What a training step costs: measurements, tables and their page."""
