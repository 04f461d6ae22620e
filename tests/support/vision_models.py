"""Tiny random vision-language models of all families that rlctl trains, and drawn images."""

from rlctl.tiny_models.vision import FAMILIES, square, write_vision_model

__all__ = ["FAMILIES", "WITH_ENGINES", "square", "write_vision_model"]

WITH_ENGINES = [family for family in FAMILIES if not family.startswith("qwen3_5")]
"""Families that vLLM computes on CPUs: it has gated delta rules on GPUs alone."""
