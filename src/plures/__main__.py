"""`python -m plures` runs the command line; `accelerate launch -m plures train` needs it."""

import sys

from plures.lab.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
