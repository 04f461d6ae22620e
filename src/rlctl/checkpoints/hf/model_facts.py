"""Facts of a model directory, from its family's file or transformers' modules. Processes without torch use a child."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

from rlctl.checkpoints.hf.hf_files import read_config
from rlctl.checkpoints.hf.published_tensors import CannotFollowError, listed_tensors, stored_buffers
from rlctl.checkpoints.hf.text_config import text_directory
from rlctl.checkpoints.hf.transformers_model import (
    body_path,
    head_of,
    head_path,
    layers_of,
    layers_path,
    meta_model,
)
from rlctl.errors import InputError
from rlctl.models.catalog import lookup_entry
from rlctl.models.facts import ListedTensor, ModelFacts, MoeFacts, RopeFacts, VisionFacts
from rlctl.models.families import facts_from_hf_config, other_architecture, sees, weights_of
from rlctl.models.hf_config import rope_of
from rlctl.models.matrices import Role
from rlctl.models.quantized_base import quantized_base
from rlctl.models.transformers_classes import built_as
from rlctl.models.vision import VisionFamily, vision_family
from rlctl.processes.child import call_in_child

WATCHED = "rlctl_watched"
"""The name of an attention that records its calls and computes nothing."""
ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention"})
FIXED_ROPE = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
"""Rotary embeddings whose frequencies do not depend on the length of a row."""
LONGROPE = "longrope"
"""The rotary embedding with other frequencies beyond its original length."""
DYNAMIC = "dynamic"
"""Rotary kind with other frequencies beyond the configured length, which rollouts never exceed."""
UNDERSTOOD = frozenset({
    "scaling", "dropout", "sliding_window", "s_aux", "softcap", "row", "is_causal", "position_ids", "use_cache",
    "cache_position", "output_attentions", "output_hidden_states", "output_router_logits", "position_embeddings",
    "module", "query", "key",
})  # fmt: skip
"""Arguments that `row_attention` of the dtensor backend uses, and arguments without effect."""
CAUSAL = ("is_causal", "is_decoder", "causal")
"""Attributes that are false in encoder attention modules."""
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k", "num_selected_experts")
"""Names that configurations have for the number of experts that a token goes to."""
NEXT = "A family can be added: one file in src/rlctl/models (docs/adding_a_model.md)."


def facts_in(directory: Path) -> ModelFacts:
    """Return the facts of a model directory, of all parts for multimodal models. Raises InputError for an unknown or
    untrainable architecture."""
    config = read_config(directory)
    if vision_family(config) is not None:
        return _described(directory, json.dumps(config, sort_keys=True))
    architecture, model_type = other_architecture(config), str(config.get("model_type"))
    if architecture is not None and built_as(model_type).lower() == architecture.lower():
        return _described(directory, json.dumps(config, sort_keys=True))
    base = None
    with contextlib.suppress(InputError):  # engines read more formats; who reads the weights refuses
        base = quantized_base(config)
    return replace(facts_from_hf_config(config), quantized=base)


def known_facts(name: str, *, images: bool = False) -> ModelFacts | None:
    """Return facts of a catalog model by hub name, without its files (the text part unless `images`); None: unknown.
    Raises InputError if transformers lacks it or it cannot be trained."""
    entry = lookup_entry(name)
    if entry is None or (images and vision_family(entry.config) is None):
        return None
    return (None if images else entry.facts) or _from_transformers(entry.names[0], images)


@cache
def _from_transformers(name: str, images: bool) -> ModelFacts:
    entry = lookup_entry(name)
    assert entry is not None
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / "config.json").write_text(json.dumps(entry.config), encoding="utf-8")
        whole = images or not sees(entry.config)
        return facts_in(directory if whole else text_directory(directory))


@cache
def _described(directory: Path, _config: str) -> ModelFacts:
    if "torch" in sys.modules:
        return describe(directory)
    return call_in_child(f"asking transformers about {directory}", partial(describe, directory), quiet=True)


Call = dict[str, Any]
"""A call of an attention: its module, shapes [1, heads, T, head_dim] of queries and keys, and its other arguments."""


def describe(directory: Path) -> ModelFacts:
    """Facts of a model whose family has no file. Raises InputError where it cannot be trained, with the reason."""
    from torch import nn

    if (family := vision_family(read_config(directory))) is not None:
        return _describe_whole(directory, family)
    calls = _watch()
    inner, unpacked = _built(directory)
    name, config = type(inner).__name__, inner.config
    if reason := next(_problems(inner), None):
        raise _refusal(name, reason)
    unpacked = unpacked or next(_unpacked(inner, calls), "")
    if unpacked:
        inner, calls = meta_model(directory, None), []
        _require_head(inner)
    ropes, listed = _ropes(inner), _listed(inner, directory)
    rope = getattr(config, "rope_parameters", None) or {}
    heads = calls[0]["query"][1] if calls else _first(config, "num_attention_heads", default=1)
    windows = [call.get("sliding_window") for call in calls]
    longest = max((int(window) for window in windows if window is not None), default=None)
    # Up to the original length longrope uses its short frequencies. RoBERTa's first positions belong to no token.
    max_length = int(getattr(config, "max_position_embeddings", None) or 2048)
    max_length -= max((module.padding_idx + 1 for module in _counting_themselves(inner)), default=0)
    if LONGROPE in ropes:
        max_length = min(max_length, int(rope["original_max_position_embeddings"]))
    return ModelFacts(
        family=name,
        layers=len(layers_of(inner)),
        hidden=int(config.hidden_size),
        heads=heads,
        kv_heads=calls[0]["key"][1] if calls else _first(config, "num_key_value_heads", default=heads),
        head_dim=calls[0]["query"][-1] if calls else _first(config, "head_dim", default=config.hidden_size // heads),
        intermediate=_first(
            config, "intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner", default=4 * config.hidden_size
        ),
        vocab=int(config.vocab_size),
        max_length=max_length,
        tied_embeddings=not any(tensor.role == Role.HEAD for tensor in listed),
        # As far as the engine has to know of it; with `alpha` (HunYuan's) frequencies are fixed.
        rope=rope_of(rope, None) if DYNAMIC in ropes and not rope.get("alpha") else RopeFacts(),
        moe=_moe(inner, listed),
        sliding_window=longest,
        full_attention_layers=None if longest is None else tuple(i for i, w in enumerate(windows) if w is None),
        listed=listed,
        unpacked=unpacked,
        takes_adapters=any(type(module) is nn.Linear for module in layers_of(inner).modules()),
        left_out=tuple(getattr(inner, "_keys_to_ignore_on_load_unexpected", None) or ()),
    )


def _describe_whole(directory: Path, family: VisionFamily) -> ModelFacts:
    """Return a multimodal model's facts: the text part's, with all tensors."""
    text, inner = facts_in(text_directory(directory)), meta_model(directory, None)
    config = inner.config
    tensors = _listed(inner, directory)
    listed = tuple(_in_whole(tensor, text, family) for tensor in tensors)
    tower = config.vision_config
    patch = tower.patch_size[0] if isinstance(tower.patch_size, list | tuple) else tower.patch_size
    merge = getattr(tower, "spatial_merge_size", None) or getattr(config, "scale_factor", None)
    merge = merge or getattr(tower, "pooling_kernel_size", None) or round(1 / getattr(config, "downsample_ratio", 0.5))
    pooled = getattr(config, "mm_tokens_per_image", None)  # Gemma 3's
    vision = VisionFacts(
        kind=str(config.model_type),
        image_token=int(getattr(config, family.image_token)),
        hidden=int(tower.hidden_size),
        layers=_first(tower, "num_hidden_layers", "depth", default=1),
        patch=int(patch),
        merge=(int(tower.image_size) // int(patch)) ** 2 // pooled if pooled else int(merge) ** 2,
        text_family=text.family,
    )
    name, tied = type(inner).__name__, not any(tensor.role == Role.HEAD for tensor in listed)
    parts = (inner, inner.get_submodule(family.language))
    left_out = tuple(each for part in parts for each in getattr(part, "_keys_to_ignore_on_load_unexpected", None) or ())
    return replace(
        text, family=name, listed=listed, tied_embeddings=tied, vision=vision, mtp_layers=0, left_out=left_out
    )


def _in_whole(tensor: ListedTensor, text: ModelFacts, family: VisionFamily) -> ListedTensor:
    """Return a multimodal model's tensor under its hub name, with the text family's role in the language part."""
    within, module = tensor, tensor.module or tensor.name
    for ours, hub in family.published:
        if tensor.name.startswith(ours) and not tensor.name.startswith(hub):
            within = replace(tensor, name=hub + tensor.name.removeprefix(ours), module=module)
    if tensor.role or "{expert}" in module or not module.startswith(f"{family.language}."):
        return within
    path = f"model.{module.removeprefix(f'{family.language}.')}".format(layer=next(iter(tensor.layers), None))
    matrices = weights_of(text).by_tensor.get(path)
    return replace(within, role=str(matrices[0].role)) if matrices else within


def _first(config: Any, *names: str, default: int) -> int:
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value), default)


def _refusal(name: str, reason: str) -> InputError:
    return InputError(f"{name} has no file in rlctl, and cannot be trained without one: {reason}.", NEXT)


def _built(directory: Path) -> tuple[Any, str]:
    """Return the model with observed attention, or with its own and the reason. Raises InputError if transformers
    cannot build it."""
    try:
        return meta_model(directory, WATCHED), ""
    except Exception:  # noqa: BLE001 - it may look its attention up in a table of its own; the next lines say what else
        try:
            return meta_model(directory, None), "its layers do not go through transformers' attention interface"
        except Exception as error:
            message = " ".join(str(error).split())
            reason = f"{directory}: transformers cannot build this model: {type(error).__name__}: {message}"
            raise InputError(reason, NEXT) from error


def _problems(inner: Any) -> Iterator[str]:
    """Why a model cannot be trained at all, or its tensors not be followed into an engine."""
    config = inner.config
    if not (body_path(inner) and layers_path(inner) and head_path(inner)):
        yield "its layers and its output layer cannot be told apart in transformers' modules"
        return
    if not isinstance(getattr(config, "hidden_size", None), int):
        yield "its layers have no one size (`hidden_size`)"
    inside = [*layers_of(inner).modules(), inner.get_submodule(body_path(inner))]
    if any(getattr(module, name, None) is False for module in inside for name in CAUSAL):
        yield "its attention is not causal"
    if key := next((key for key in ("prefix_lm", "prompt_types") if getattr(config, key, None)), None):
        yield f"its attention is not causal in a prompt ({key})"
    if any(hasattr(layer, "backward_pass") for layer in layers_of(inner)):
        yield "its layers compute their gradients themselves, and only with dropout"
    if scalars := [name for name, parameter in inner.named_parameters() if not parameter.dim()]:
        yield f"{scalars[0]} is a single number, which FSDP2 cannot shard"
    owners: dict[int, str] = {}  # embedding and head may be one parameter, and no others
    for name, parameter in layers_of(inner).named_parameters(remove_duplicate=False):
        if owners.setdefault(id(parameter), name) != name:
            yield f"{layers_path(inner)}.{name} is the same parameter as another layer's"
    if ropes := _ropes(inner) - FIXED_ROPE - {LONGROPE, DYNAMIC}:
        yield f"its rotary frequencies ({min(ropes)}) are not known to rlctl"
    if DYNAMIC in _ropes(inner) and "rope_type" not in config.rope_parameters:
        yield f"its rotary frequencies ({DYNAMIC}) belong to only some layers, which rlctl does not support"


def _ropes(inner: Any) -> set[str]:
    kinds = [getattr(module, "rope_type", None) for module in inner.modules()]
    texts = [kind for kind in kinds if isinstance(kind, str)]
    return {*texts, *(kind for rope in kinds if isinstance(rope, dict) for kind in rope.values())}


def _counting_themselves(inner: Any) -> list[Any]:
    return [module for module in inner.modules() if hasattr(module, "create_position_ids_from_input_ids")]


def _watch() -> list[Call]:
    from transformers import AttentionInterface

    calls: list[Call] = []

    def watched(module: Any, query: Any, key: Any, value: Any, mask: Any = None, **options: Any) -> tuple[Any, None]:
        calls.append(options | {"module": module, "query": query.shape, "key": key.shape, "mask": mask})
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    AttentionInterface.register(WATCHED, watched)
    return calls


def _unpacked(inner: Any, calls: list[Call]) -> Iterator[str]:
    """Return why rollouts cannot be packed for this model: each layer must call the observed attention."""
    import torch
    from torch import nn

    config, row, layers = inner.config, object(), len(layers_of(inner))
    kinds = set(getattr(config, "layer_types", None) or ()) - ATTENTION_KINDS
    kinds |= {type(module).__name__ for module in inner.modules() if isinstance(module, nn.modules.conv._ConvNd)}
    if kinds:
        yield f"its layers mix tokens by {min(kinds)}, which does not know where a packed row's rollouts begin"
    if _counting_themselves(inner):
        yield "it counts positions from its padding token's number on (as RoBERTa does), and not from 0"
    for module in inner.modules():
        if any(parameter.dim() > 2 for parameter in module.parameters(recurse=False)):
            module.forward = lambda tokens, *_, **__: torch.zeros_like(tokens)  # experts look at values
    body = inner.get_submodule(body_path(inner))
    body.warn_if_padding_and_no_attention_mask = lambda *_: None  # looks at values

    @torch.no_grad()
    def run(positions: int) -> Any:
        tokens, places = (torch.zeros((1, n), dtype=torch.long, device="meta") for n in (8, positions))
        return body(input_ids=tokens, position_ids=places, use_cache=False, row=row).last_hidden_state

    try:
        vocab = head_of(inner)(run(8)[0]).shape[-1]
    except Exception as error:  # noqa: BLE001 - whatever it is, the model is then called as transformers calls it
        yield f"its forward pass cannot be followed: {type(error).__name__}: {error}".splitlines()[0]
        return
    if vocab != config.vocab_size:
        yield f"its head makes {vocab} logits of a vocabulary of {config.vocab_size}"
    if len(calls) != layers or len({id(call["module"]) for call in calls}) != layers:
        yield f"{len(calls)} of its {layers} layers call transformers' attention interface, and each has to do so once"
    for call in calls:
        if call.get("row") is not row or call["mask"] is not None:
            yield "its layers do not hand on to the attention which tokens are one rollout's"
        if call.get("is_causal", getattr(call["module"], "is_causal", True)) is False:
            yield "its attention is not causal"
        if unknown := {key for key, value in call.items() if value is not None} - UNDERSTOOD:
            yield f"its attention takes {min(unknown)}, which rlctl's does not"
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    layer_types = getattr(config, "layer_types", None) or ["sliding_attention"] * len(calls)
    windows = [call.get("sliding_window") for call in calls]
    if windows != [window if kind == "sliding_attention" else None for kind in layer_types]:
        yield "its layers do not tell the attention how many tokens they attend to"
    with contextlib.suppress(Exception):  # shapes that do not fit, in the words of whichever function comes first
        run(9)
        yield "its layers do not take the positions of tokens as they are given"
    del calls[layers:]


def _require_head(inner: Any) -> None:
    import torch

    name, vocab = type(inner).__name__, inner.config.vocab_size
    hidden = torch.zeros((8, inner.get_output_embeddings().weight.shape[1]), device="meta")
    try:
        with torch.no_grad():
            logits = head_of(inner)(hidden)
    except Exception as error:
        reason = f"its output layer cannot be computed separately: {type(error).__name__}: {error}".splitlines()[0]
        raise _refusal(name, reason) from error
    if tuple(logits.shape) != (8, vocab):
        raise _refusal(name, f"its head makes {tuple(logits.shape)[-1]} logits of a vocabulary of {vocab}")


def _listed(inner: Any, directory: Path) -> tuple[ListedTensor, ...]:
    import torch

    dtypes = dict[str, str]()
    if buffers := stored_buffers(inner):
        buffer_dtypes = {name: str(b.dtype) for name, b in meta_model(directory, None, torch.bfloat16).named_buffers()}
        dtypes = {
            name: dtype for name in buffers if (dtype := buffer_dtypes[name].removeprefix("torch.")) != "bfloat16"
        }
    try:
        return listed_tensors(inner, dtypes)
    except CannotFollowError as error:
        raise _refusal(type(inner).__name__, error.message) from error


def _moe(inner: Any, listed: tuple[ListedTensor, ...]) -> MoeFacts | None:
    """Experts, where transformers stacks them."""
    stacks = [tensor for tensor in listed if tensor.role == Role.EXPERT_STACK]
    ups = [tensor for tensor in listed if tensor.role == Role.EXPERT_UP] or stacks
    if not ups:
        return None
    of_experts = (*stacks, *(tensor for tensor in listed if "{expert}" in tensor.name))
    counts = {(tensor.module_shape or tensor.shape)[0] for tensor in of_experts}
    if len(counts) > 1:
        raise _refusal(type(inner).__name__, f"its parameters are of {min(counts)} experts and of {max(counts)}")
    with_experts = {layer for tensor in ups for layer in tensor.layers}
    dense = tuple(i for i in range(len(layers_of(inner))) if i not in with_experts)
    chosen = next((value for name in CHOSEN if (value := getattr(inner.config, name, None))), None)
    if chosen is None:
        raise _refusal(type(inner).__name__, f"its config.json does not say how many experts a token has ({CHOSEN[0]})")
    per_token = max(chosen) if isinstance(chosen, list | tuple) else int(chosen)
    if ups is stacks:  # the down-projections are the smallest: gates and ups are often one tensor
        matrices = [prod(tensor.shape[1:]) for tensor in stacks if len(tensor.shape) == 3]
        width = min(matrices) // inner.config.hidden_size
    else:
        width = ups[0].shape[0]
    return MoeFacts(min(counts), per_token, width, dense_layers=dense)
