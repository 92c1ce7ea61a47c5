"""Entry point of ``python -m dsv41ops.bench``."""

import sys

from dsv41ops.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
