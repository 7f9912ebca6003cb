"""``python -m dlmkern`` is the command ``dlmkern``."""

import sys

from dlmkern.cli import main

sys.exit(main())
