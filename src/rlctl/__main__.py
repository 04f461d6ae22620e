"""`python -m rlctl` is the command `rlctl`."""

from rlctl.cli import main

main()
