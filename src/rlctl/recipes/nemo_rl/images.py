"""Recipes with images: the backend that trains them, frozen parts, and words that are never sampled."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlctl.config.recipes import Import
from rlctl.recipes.nemo_rl.mapping_rules import MEGATRON, megatron_on
from rlctl.recipes.rules import Leaf, Rule
from rlctl.settings.data import VisionPart

MODEL = "policy.model_name"
ONLY_MEGATRON = (
    "megatron.", "ddp.", "training.pp", "training.vpp", "training.cp", "training.etp", "training.sequence_parallel",
    "training.first_stage_layers", "training.last_stage_layers",
)  # fmt: skip
"""Beginnings of keys that the backend which trains images does without."""
PARTS: tuple[VisionPart, ...] = ("vision", "projector", "language")
_PLACEHOLDER = re.compile(r"</?\|?\w*(image|img|vision|video|so_|audio|sound)\w*\|?>")
"""Texts of tokens for images or sound, or around them."""


def reads_images(leaf: Leaf) -> bool:
    """Return whether the recipe's model is trained with its vision part."""
    return leaf.result.values.get("model.images") is True


def keeps_template(leaf: Leaf) -> bool:
    """Return whether the chat template of the model's processor wins over the recipe's; the command line can replace
    it."""
    return reads_images(leaf) and leaf.name not in leaf.result.overridden


def freezes(*parts: VisionPart) -> Rule:
    """Return the rule of a switch that freezes parts of a model that reads images."""

    def rule(leaf: Leaf) -> None:
        if not reads_images(leaf):
            leaf.skip("the text part alone is trained")
        elif not leaf.value:
            leaf.skip("it is off")
        else:
            vision: tuple[VisionPart, ...] = parts
            if parts == ("vision",) and leaf.name.endswith("_tower") and "qwen" in str(leaf.get(MODEL)).lower():
                vision = (
                    "vision",
                    "projector",
                )  # Automodel freezes the whole of `visual`, which holds Qwen's projector
            frozen = {*leaf.result.values.get("model.freeze", ()), *vision}
            leaf.map_all({"model.freeze": [part for part in PARTS if part in frozen]})

    return rule


def forbidden_words(leaf: Leaf) -> None:
    """Leave out words that rlctl never samples: image tokens, and tokens around images."""
    others = [word for word in leaf.value or () if not _PLACEHOLDER.fullmatch(str(word))]
    if others:
        leaf.say("not yet", f"tokens of images are never sampled, and no other words are forbidden: {others[0]}")
    else:
        leaf.skip("tokens that stand for images are never sampled")


def media_limit(leaf: Leaf) -> None:
    """Map the most images of a prompt, after which vLLM reserves memory."""
    kind = leaf.name.rpartition(".")[2]
    if kind == "image" and isinstance(leaf.value, int):
        leaf.map("vllm.limit_mm_per_prompt", {"image": leaf.value})
    else:
        leaf.skip("prompts are texts and images")


def on_dtensor(result: Import, leaves: Mapping[str, Any]) -> None:
    """Give a Megatron recipe the backend that trains images, and report it in one line. Learning rate and schedule stay
    from Megatron's block."""
    if result.values.get("model.images") is not True or not megatron_on(leaves):
        return
    left_out = {key for key in result.values if key.startswith(ONLY_MEGATRON)}
    sources = {result.source[key] for key in left_out}
    for key in left_out:
        del result.values[key], result.source[key]
    reason = "images are trained by the backend dtensor, which has no such key"
    result.entries = [
        replace(entry, status="not applicable", note=reason)
        if entry.key in sources and entry.status != "not yet"
        else entry
        for entry in result.entries
    ]
    if result.values.get("training.recompute") == "selective":
        result.values["training.recompute"] = "full"
    switch = f"{MEGATRON}.enabled"
    result.set("training.backend", "dtensor", switch)
    remark = "runs with training.backend: dtensor, because Megatron trains no images here"
    result.entries = [
        replace(entry, status="changed", note=remark) if entry.key == switch else entry for entry in result.entries
    ]
