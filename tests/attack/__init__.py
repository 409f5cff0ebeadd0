"""An attack on what plures promises of strangers' files, threads and commands; `make attack` runs it."""
