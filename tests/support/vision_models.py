"""Tiny random vision-language models of all families that rlctl trains, and drawn images."""

from rlctl.jobs.tiny_vision import FAMILIES, square, write_vision_model

__all__ = ["FAMILIES", "square", "write_vision_model"]
