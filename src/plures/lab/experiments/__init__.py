"""Experiments: many runs side by side, their tables and figures, and those of the paper."""
