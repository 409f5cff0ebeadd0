"""The command line: a class per command."""
