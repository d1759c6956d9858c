"""``python -m packhorse``."""

from __future__ import annotations

import sys

from packhorse.cli import main

if __name__ == "__main__":
    sys.exit(main())
