"""The compiled step: traced, differentiated in forward mode, compiled and captured. Others import ``fast_gradients`` only."""
