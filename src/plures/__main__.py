"""`python -m plures` runs the command line."""

import sys

from plures.lab.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
