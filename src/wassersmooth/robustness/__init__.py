"""Measuring any classifier: attacks, natural variations, and a report that says whether its numbers can be trusted."""
