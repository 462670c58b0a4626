"""`python -m zbfx`."""

import sys

from zbfx.cli import main

if __name__ == "__main__":
    sys.exit(main())
