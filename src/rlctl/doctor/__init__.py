"""Checks of the machine: one function each, with its inputs as parameters."""
