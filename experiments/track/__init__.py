"""The track: a penalty that stands beside PGD-7 training, by one number and one rule."""
