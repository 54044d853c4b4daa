"""``python -m snapstream.cli``."""

import sys

from snapstream.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
