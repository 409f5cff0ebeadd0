"""`python -m plures` runs the command line; `accelerate launch -m plures train` needs it."""

import sys

try:
    from plures.lab.cli.main import main
except ModuleNotFoundError as error:  # the laboratory is optional, the library is not
    sys.exit(f"plures: the command line needs {error.name}: pip install 'plures[lab]'")

if __name__ == "__main__":
    sys.exit(main())
