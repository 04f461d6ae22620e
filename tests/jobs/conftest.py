"""Whole runs that several files of this folder read."""

from __future__ import annotations
