"""Objectives for training: a loss, and what makes the classifier smooth where images vary."""
