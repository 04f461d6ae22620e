"""Checks of the machine: one function a check, each with what it looks at as a parameter."""
