"""From an ensemble to one file that runs without it: what is traced, how it is written, what is said when it fails."""
