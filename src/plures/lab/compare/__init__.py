"""Compare many runs: what to run, where to run it, progress, and the table of results."""
