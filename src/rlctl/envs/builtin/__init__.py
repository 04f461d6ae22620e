"""Environments that come with rlctl."""

BUILT_IN: dict[str, str] = {}
"""`module:Class` of each, by its name."""
