"""`python -m rlctl` is the command `rlctl`."""

import sys
from pathlib import Path

if not sys.flags.safe_path:
    # Python has put the working directory first. Where this package was found there, it stays the last resort.
    package = str(Path(__file__).parents[1])
    sys.path[:] = [*sys.path[1:], package]

from rlctl.cli import main

main()
