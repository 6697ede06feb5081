"""``python -m ortserve``."""

import sys

from ortserve.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
