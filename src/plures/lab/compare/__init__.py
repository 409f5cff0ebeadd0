"""Many runs side by side: what to run, where, how far they are, and their table."""
