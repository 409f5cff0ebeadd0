"""Export an ensemble to one file that runs without plures: tracing, writing, and errors."""
