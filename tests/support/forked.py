"""Imports all that the ranks of a pool need. The server that they are forked from imports this module once."""

from __future__ import annotations

import pytest  # noqa: F401 - the main module, which each process imports

from rlctl.backends.megatron import cpu

cpu.install()

from support import host_states, parallel_cases, parallel_families  # noqa: E402, F401
