"""What to train with on a network that people use, how strong, and what it costs."""
