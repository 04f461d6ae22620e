"""The families of models that read images and are trained whole: where their parts are in transformers' modules."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from rlctl.settings.data import VisionPart


@dataclass(frozen=True)
class VisionFamily:
    """A model type."""

    language: str
    """Path of the language part in transformers' modules."""
    tower: str
    """Path of the tower."""
    projector: str
    """Pattern of the paths of the projector; it may lie inside the tower."""
    image_token: str
    """Key of the configuration with the token in whose places the embeddings of images stand."""
    published: tuple[tuple[str, str], ...] = ()
    """Differing name prefixes in transformers' and the hub's files."""
    mutual: bool = False
    """Whether tokens of an image attend to each other in both directions; vLLM on CPUs is causal."""
    sound: str = ""
    """Pattern of the paths of the part that reads sound, which is never trained; empty: the family has none."""

    def part_of(self, module: str) -> VisionPart | Literal["sound"]:
        if self.sound and re.match(rf"(?:{self.sound})(?:\.|$)", module):
            return "sound"
        if re.match(rf"(?:{self.projector})(?:\.|$)", module):
            return "projector"
        return "vision" if f"{module}.".startswith(f"{self.tower}.") else "language"


_IDEFICS = VisionFamily("model.text_model", "model.vision_model", r"model\.connector", "image_token_id")
_QWEN = VisionFamily(
    "model.language_model", "model.visual", r"model\.visual\.(?:merger|deepstack_merger_list)", "image_token_id"
)
_PROJECTOR = r"model\.multi_modal_projector"
VISION_FAMILIES = {
    "gemma3": VisionFamily(
        "model.language_model", "model.vision_tower", _PROJECTOR, "image_token_index",
        (("vision_tower.", "vision_tower.vision_model."),), mutual=True,
    ),
    "gemma4": VisionFamily(
        "model.language_model", "model.vision_tower", r"model\.embed_vision", "image_token_id",
        sound=r"model\.(?:audio_tower|embed_audio)",
    ),
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "internvl": VisionFamily("model.language_model", "model.vision_tower", _PROJECTOR, "image_token_id"),
}  # fmt: skip
"""By `model_type` of config.json."""


_OTHER_CONFIGURATIONS = (
    "transformers and vLLM read different configurations of it, so that engine and trainer cannot open the same files, "
    "and vLLM computes the embeddings of its images in bfloat16 only"
)
UNTRAINED = {"NemotronH_Nano_Omni_Reasoning_V3": _OTHER_CONFIGURATIONS, "nemotron_h_omni": _OTHER_CONFIGURATIONS}
"""`model_type` of models that read images and are not trained on them -> why."""


def vision_family(config: dict[str, Any]) -> VisionFamily | None:
    """Return the family of a config.json; None: it is no model whose images rlctl trains on."""
    sees = isinstance(config.get("vision_config"), dict) and not why_untrained(config)
    return VISION_FAMILIES.get(str(config.get("model_type"))) if sees else None


def why_untrained(config: dict[str, Any]) -> str:
    """Return why a vision model is not trained on images, as a clause; empty: it is, or the reason is unknown."""
    text = config.get("text_config")
    mode = (text if isinstance(text, dict) else config).get("use_bidirectional_attention")
    if mode and str(config.get("model_type")).startswith("gemma4"):
        return f"in some layers the tokens of an image attend to later ones (use_bidirectional_attention: {mode})"
    return UNTRAINED.get(str(config.get("model_type")), "")
