"""Checks of the machine. Each check is one function, and takes what it looks at as parameters."""
