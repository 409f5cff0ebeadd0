"""Compare many runs: the runs, their processes, progress, and the table of results."""
