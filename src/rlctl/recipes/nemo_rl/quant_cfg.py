"""ModelOpt quantization in NeMo-RL recipes (`quant_cfg`): a name or a file of rules.

A rule switches quantizers by a pattern of `<module>.weight_quantizer` and `<module>.input_quantizer`; later rules win.
Here patterns match published tensors, `<module>.weight`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from rlctl.config.files import read_text
from rlctl.recipes.nemo_rl.mapping_rules import folders_of
from rlctl.recipes.rules import Leaf

OWN_NAMES = {
    "W4A16_NVFP4_CFG": (("*",), 16),
    "NVFP4_MLP_WEIGHT_ONLY_CFG": (("*mlp*", "*block_sparse_moe*"), 32),
}
"""ModelOpt's weight-only configurations: layers, and weights with a shared scale."""
OF_ACTIVATIONS = ("NVFP4_DEFAULT_CFG", "NVFP4_MLP_ONLY_CFG", "NVFP4_EXPERTS_ONLY_CFG", "NVFP4_OMLP_ONLY_CFG")
LEFT_OUT = ("*linear_attn.in_proj_a*", "*linear_attn.in_proj_b*")
"""Linear layers excluded by ModelOpt's configurations."""
ACTIVATIONS = "it rounds activations too (input_quantizer), and rlctl rounds weights alone"
WEIGHT, INPUT = "weight_quantizer", "input_quantizer"
KEY = "training.quantization"


class _Unreadable(Exception):
    """A configuration that means something else than rlctl does; the reason."""


def quantized_training(leaf: Leaf) -> None:
    """Map the policy's quantization, which engines share."""
    name = "policy.generation.quant_cfg"
    if leaf.value is None:
        leaf.skip("what rlctl does")
    elif leaf.leaves.get(name) != leaf.value and any(key.startswith("policy.generation.") for key in leaf.leaves):
        leaf.say("not yet", f"engines compute with the policy's weights, and {name} is another", f"{KEY}.format")
    else:
        try:
            values = _values(leaf)
        except _Unreadable as error:
            leaf.say("not yet", str(error), f"{KEY}.format")
            return
        but = "scales of matrices follow the weights, where ModelOpt keeps the first ones"
        leaf.map_all({f"{KEY}.{key}": value for key, value in values.items()}, but)


def quantized_engines(leaf: Leaf) -> None:
    if leaf.value is None:
        leaf.skip("what rlctl does")
    elif leaf.leaves.get("policy.quant_cfg") is None:
        reason = "engines compute with the policy's weights, and policy.quant_cfg is unset"
        leaf.say("not yet", reason, f"{KEY}.format")
    else:
        leaf.skip(f"engines get the policy's rounded weights: {KEY}")


def _values(leaf: Leaf) -> dict[str, Any]:
    if leaf.value in OWN_NAMES:
        tensors, block = OWN_NAMES[leaf.value]
        return {"format": "nvfp4", "block": block, "tensors": list(tensors), "exclude": list(LEFT_OUT)}
    if leaf.value in OF_ACTIVATIONS:
        raise _Unreadable(ACTIVATIONS)
    for path in (folder / str(leaf.value) for folder in folders_of(leaf)):
        if path.is_file():
            content = yaml.safe_load(read_text(path, leaf.name))
            return _of_rules(content.get("quantize", content))
    names = ", ".join(OWN_NAMES)
    raise _Unreadable(f"rlctl knows {names}, and files that are here or above the recipe")


def _of_rules(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of rules: included, then excluded patterns."""
    if settings.get("algorithm", "max") != "max":
        raise _Unreadable(f"its algorithm is {settings['algorithm']}, and scales come from the largest weights")
    tensors: list[str] = []
    exclude: list[str] = []
    blocks: set[int] = set()
    for rule in settings["quant_cfg"]:
        name = rule.get("quantizer_name")
        if name is None:
            raise _Unreadable("it builds on rules of ModelOpt's")
        if rule.get("parent_class") is not None:  # of norms and activations, which are no linear layers
            continue
        if rule.get("enable", True):
            blocks.add(_block_of(rule))
            if exclude or not name.endswith(WEIGHT):
                raise _Unreadable(f"its rule {name} is on after others are off, or of no weights")
            tensors.append(_pattern(name))
        elif name == "*":
            tensors, exclude, blocks = [], [], set()
        elif not name.endswith(INPUT):
            exclude.append(_pattern(name))
    if len(blocks) != 1:
        raise _Unreadable("no weights are rounded" if not blocks else "blocks have several sizes")
    return {"format": "nvfp4", "block": blocks.pop(), "tensors": tensors, "exclude": exclude}


def _block_of(rule: Mapping[str, Any]) -> int:
    settings = rule.get("cfg") or {}
    sizes = settings.get("block_sizes") or {}
    size, names = sizes.get(-1), (settings.get("num_bits"), sizes.get("scale_bits"), sizes.get("type"))
    if rule["quantizer_name"].endswith(INPUT):
        raise _Unreadable(ACTIVATIONS)
    if tuple(map(_format, names)) != ("e2m1", "e4m3", "dynamic") or size not in (16, 32):
        raise _Unreadable(f"its rule {rule['quantizer_name']} is not of NVFP4")
    return size


def _format(name: Any) -> str:
    return "e{}m{}".format(*name) if isinstance(name, Iterable) and not isinstance(name, str) else str(name).lower()


def _pattern(name: str) -> str:
    pattern = name.removesuffix(WEIGHT)
    return pattern if pattern.endswith("*") else f"{pattern}*"
