"""The facts of a model in a directory. Where its family has no file in `models/`, they follow from the modules that
transformers builds of its configuration, or these say why it cannot be trained.

A process without torch has the facts found by another one, which runs this file: the driver does without torch.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlctl.checkpoints.hf.hf_files import read_config
from rlctl.checkpoints.hf.transformers_model import (
    body_path,
    fill_buffers,
    head_of,
    head_path,
    layers_of,
    layers_path,
    meta_model,
)
from rlctl.errors import InputError
from rlctl.models.catalog import facts_of
from rlctl.models.facts import ListedTensor, ModelFacts, MoeFacts
from rlctl.models.families import facts_from_hf_config, other_architecture
from rlctl.models.matrices import Role

WATCHED = "rlctl_watched"
"""The name of an attention that computes nothing and notes how it is called."""
STACKS = {
    "experts.gate_up_proj": (Role.EXPERT_GATE, Role.EXPERT_UP),
    "experts.down_proj": (Role.EXPERT_DOWN,),
}
"""Modules that transformers makes of one published tensor for each expert and role: [E, 2 I, H] and [E, H, I]."""
STACKING = (["MergeModulelist", "Concatenate"], ["MergeModulelist"])
"""Names of the operations by which it does so, in the order of `STACKS`."""
ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention"})
FIXED_ROPE = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
"""Rotary embeddings whose frequencies do not depend on the length of a row."""
LONGROPE = "longrope"
"""The rotary embedding with other frequencies beyond its original length."""
UNDERSTOOD = frozenset({
    "scaling", "dropout", "sliding_window", "s_aux", "softcap", "row", "is_causal", "position_ids", "use_cache",
    "cache_position", "output_attentions", "output_hidden_states", "output_router_logits", "position_embeddings",
})  # fmt: skip
"""Arguments with which `row_attention` of the dtensor backend computes, and others that change nothing."""
BIAS = ("score_correction_bias", "expert_bias")
"""Ends of the names of buffers by which routers choose experts: they are stored, and kept in float32."""
NOT_BUILT = (ValueError, OSError, ImportError, AttributeError, TypeError, AssertionError)
"""Errors of transformers for a configuration of which it can build no model."""
NEXT = "A family can be added: one file in src/rlctl/models (docs/adding_a_model.md)."


def facts_in(directory: Path) -> ModelFacts:
    """Facts of the model in a directory, whether its family has a file or transformers alone knows it.

    Raises InputError for an unknown architecture, and for one that cannot be trained from transformers' modules.
    """
    config = read_config(directory)
    architecture = other_architecture(config)
    if architecture is None or not _transformers_has(str(config.get("model_type")), architecture):
        return facts_from_hf_config(config)
    return _described(directory, json.dumps(config, sort_keys=True))


@cache
def _transformers_has(model_type: str, architecture: str) -> bool:
    """Whether the installed transformers has such a model, found without importing it. Its folders are searched for
    class and model type: some hold several types, which have other names than the folder (llama4_text in llama4)."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return False
    models = Path(spec.origin).parent / "models"
    modeling = (file for file in models.glob("*/modeling_*.py") if f"\nclass {architecture}(" in _text(file))
    configurations = (file for found in modeling for file in found.parent.glob("configuration_*.py"))
    own_type = re.compile(rf'^ +model_type\b.*= "{re.escape(model_type)}"$', re.MULTILINE)
    return any(own_type.search(_text(file)) for file in configurations)


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")


@cache
def _described(directory: Path, _config: str) -> ModelFacts:
    if "torch" in sys.modules:
        return describe(directory)
    command = [sys.executable, "-P", "-m", __name__, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        told = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise InputError(f"{directory}: transformers could not be asked about this model: {told[0]}.", NEXT)
    answer = json.loads(done.stdout.splitlines()[-1])
    if "message" in answer:
        raise InputError(answer["message"], answer["hint"])
    listed = tuple(
        ListedTensor(**tensor | {"shape": tuple(tensor["shape"]), "layers": tuple(tensor["layers"])})
        for tensor in answer.pop("listed")
    )
    plain = {key: value for key, value in answer.items() if value is not None}
    return facts_of(plain | {"listed": listed})


# A family without a file


@dataclass(frozen=True)
class Call:
    """One call of a layer's attention."""

    module: Any
    query: tuple[int, ...]
    key: tuple[int, ...]
    mask: Any
    told: dict[str, Any]


def describe(directory: Path) -> ModelFacts:
    """Facts of a model whose family has no file. Raises InputError where it cannot be trained, with the reason."""
    calls = _watch()
    inner, unpacked = _built(directory)
    if why := next(_problems(inner), None):
        raise _refusal(type(inner).__name__, why)
    unpacked = unpacked or next(_unpacked(inner, calls), "")
    if unpacked:
        inner = _built_plainly(directory)
        _require_head(inner)
    fill_buffers(_with_buffers(inner))
    config, listed = inner.config, tuple(listed_tensors(inner))
    calls = [] if unpacked else calls
    heads = int(getattr(config, "num_attention_heads", None) or 1)
    windows = {int(window) for call in calls if (window := call.told.get("sliding_window")) is not None}
    full = tuple(i for i, call in enumerate(calls) if call.told.get("sliding_window") is None)
    return ModelFacts(
        family=type(inner).__name__,
        layers=len(layers_of(inner)),
        hidden=int(config.hidden_size),
        heads=calls[0].query[1] if calls else heads,
        kv_heads=calls[0].key[1] if calls else int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=calls[0].query[-1] if calls else int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        intermediate=_intermediate(config),
        vocab=int(config.vocab_size),
        max_length=_max_length(inner),
        tied_embeddings=not any(tensor.role == Role.HEAD for tensor in listed),
        moe=_moe(inner, listed),
        sliding_window=max(windows, default=None),
        full_attention_layers=full if windows else None,
        listed=listed,
        unpacked=unpacked,
        left_out=tuple(getattr(inner, "_keys_to_ignore_on_load_unexpected", None) or ()),
    )


def _refusal(name: str, why: str) -> InputError:
    return InputError(f"{name} has no file in rlctl, and cannot be trained without one: {why}.", NEXT)


def _built(directory: Path) -> tuple[Any, str]:
    """The model with the attention that is watched, and an empty text; or as transformers has it, and why it takes no
    other attention. Raises InputError where transformers cannot build it."""
    try:
        return meta_model(directory, WATCHED), ""
    except KeyError as error:
        if error.args != (WATCHED,):  # the model looks its attention up in a table of its own
            raise _not_built(directory, error) from error
    except NOT_BUILT:
        pass
    return _built_plainly(directory), "its layers do not go through transformers' attention interface"


def _built_plainly(directory: Path) -> Any:
    try:
        return meta_model(directory, None)
    except (KeyError, *NOT_BUILT) as error:
        raise _not_built(directory, error) from error


def _not_built(directory: Path, error: Exception) -> InputError:
    why = f"{directory}: transformers cannot build this model: {type(error).__name__}: {error}"
    return InputError(why.splitlines()[0], NEXT)


def _problems(inner: Any) -> Iterator[str]:
    """Why a model cannot be trained at all, or its tensors not be followed into an engine."""
    if not (body_path(inner) and layers_path(inner) and head_path(inner)):
        yield "its layers and its output layer cannot be told apart in transformers' modules"
        return
    if not isinstance(getattr(inner.config, "hidden_size", None), int):
        yield "its layers have no one size (`hidden_size`)"
    if any(getattr(module, "is_causal", None) is False for module in layers_of(inner).modules()):
        yield "its attention is not causal"
    if kept := [name for name in _stored_buffers(inner) if not name.endswith(BIAS)]:
        yield f"{kept[0]} is stored and not trained"
    if scalars := [name for name, parameter in inner.named_parameters() if not parameter.dim()]:
        yield f"{scalars[0]} is a single number, which FSDP2 cannot shard"
    if shared := _shared(inner):
        yield f"{shared} is the same parameter as another layer's"
    if ropes := _ropes(inner) - FIXED_ROPE - {LONGROPE}:
        yield f"its rotary frequencies ({min(ropes)}) depend on the longest rollout of a row, and vLLM's on no rollout"
    yield from _valueless(inner)
    yield from _changed_tensors(inner)


def _stored_buffers(inner: Any) -> dict[str, Any]:
    """Buffers that checkpoints hold, such as what routers add to choose experts by."""
    buffers = dict(inner.named_buffers())
    return {name: buffers[name] for name in inner.state_dict() if name in buffers}


def _shared(inner: Any) -> str:
    """A parameter of a layer that another module has too; empty: there is none. Embedding and head may be one."""
    own: dict[int, str] = {}
    for name, parameter in layers_of(inner).named_parameters(remove_duplicate=False):
        if own.setdefault(id(parameter), name) != name:
            return f"{layers_path(inner)}.{name}"
    return ""


def _valueless(inner: Any) -> Iterator[str]:
    from torch import Tensor

    for path, module in inner.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and not key.endswith("original_inv_freq"):
                yield f"{path}.{key} is neither a parameter nor a buffer, and has no values"


def _ropes(inner: Any) -> set[str]:
    """The kinds of rotary embedding."""
    kinds = [getattr(module, "rope_type", None) for module in inner.modules()]
    texts = [kind for kind in kinds if isinstance(kind, str)]
    return {*texts, *(kind for own in kinds if isinstance(own, dict) for kind in own.values())}


def _max_length(inner: Any) -> int:
    """Tokens that a rollout may have. Up to the original length, longrope's frequencies are always its short ones."""
    limit = int(getattr(inner.config, "max_position_embeddings", None) or 2048)
    if LONGROPE not in _ropes(inner):
        return limit
    return min(limit, int(inner.config.rope_parameters["original_max_position_embeddings"]))


def _intermediate(config: Any) -> int:
    widths = (getattr(config, name, None) for name in ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner"))
    return int(next((width for width in widths if isinstance(width, int) and width), 4 * config.hidden_size))


# Whether rollouts can be packed


def _unpacked(inner: Any, calls: list[Call]) -> Iterator[str]:
    """Why rollouts cannot be packed into a row of this model, which has the attention that is watched."""
    from torch import nn

    kinds = set(getattr(inner.config, "layer_types", None) or ()) - ATTENTION_KINDS
    kinds |= {type(module).__name__ for module in inner.modules() if isinstance(module, nn.modules.conv._ConvNd)}
    if kinds:
        yield f"its layers mix tokens by {min(kinds)}, which does not know where a packed row's rollouts begin"
        return
    yield from _unpacked_by_calls(inner, calls)


def _watch() -> list[Call]:
    """Register the attention that is watched; its calls will be in the list."""
    from transformers import AttentionInterface

    calls: list[Call] = []

    def watched(module: Any, query: Any, key: Any, value: Any, mask: Any = None, **told: Any) -> tuple[Any, None]:
        calls.append(Call(module, tuple(query.shape), tuple(key.shape), mask, told))
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    AttentionInterface.register(WATCHED, watched)
    return calls


def _unpacked_by_calls(inner: Any, calls: list[Call]) -> Iterator[str]:
    """Have each layer call its attention, and yield what is not understood of the calls."""
    import torch
    from torch.overrides import TorchFunctionMode

    tokens, positions = (torch.zeros((1, 8), dtype=torch.long, device="meta") for _ in range(2))
    row, uses, looks = object(), list[Any](), _looks()

    class Positions(TorchFunctionMode):
        """Notes what is computed from the positions."""

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(value is positions for value in (*args, *(kwargs or {}).values())) and function not in looks:
                uses.append(function)
            return function(*args, **(kwargs or {}))

    for module in inner.modules():
        if any(parameter.dim() > 2 for parameter in module.parameters(recurse=False)):
            module.forward = lambda tokens, *_, **__: torch.zeros_like(tokens)  # experts look at values
    body = inner.get_submodule(body_path(inner))
    body.warn_if_padding_and_no_attention_mask = lambda *_: None  # looks at values
    try:
        with torch.no_grad():
            with Positions():
                found = body(input_ids=tokens, position_ids=positions, use_cache=False, row=row).last_hidden_state
            logits = head_of(inner)(found[0])
    except Exception as error:  # noqa: BLE001 - whatever it is, the model is then called as transformers calls it
        yield f"its forward pass cannot be followed: {type(error).__name__}: {error}".splitlines()[0]
        return
    if tuple(logits.shape) != (8, inner.config.vocab_size):
        yield f"its head makes {tuple(logits.shape)[-1]} logits of a vocabulary of {inner.config.vocab_size}"
    yield from _strange_calls(calls, len(layers_of(inner)), row)
    if [call.told.get("sliding_window") for call in calls] != _windows(inner.config, len(calls)):
        yield "its layers do not tell the attention how many tokens they attend to"
    if not uses:
        yield "its layers do not take the positions of tokens as they are given"


def _windows(config: Any, layers: int) -> list[int | None]:
    """The tokens that each layer attends to, by the configuration; None: all."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _looks() -> frozenset[Any]:
    """Functions that look at a tensor and not at its values."""
    import torch

    names = ("shape", "device", "dtype", "ndim")
    return frozenset(getattr(torch.Tensor, name).__get__ for name in names) | {torch.Tensor.size, torch.Tensor.dim}


def _strange_calls(calls: list[Call], layers: int, row: object) -> Iterator[str]:
    if len(calls) != layers or len({id(call.module) for call in calls}) != layers:
        yield f"{len(calls)} of its {layers} layers call transformers' attention interface, and each has to do so once"
    for call in calls:
        if call.told.get("row") is not row or call.mask is not None:
            yield "its layers do not hand on to the attention which tokens are one rollout's"
        causal = call.told.get("is_causal", getattr(call.module, "is_causal", True))
        if causal is False:
            yield "its attention is not causal"
        unknown = {key for key, value in call.told.items() if value is not None} - UNDERSTOOD
        if unknown:
            yield f"its attention takes {min(unknown)}, which rlctl's does not"


def _require_head(inner: Any) -> None:
    """Raise InputError unless the model's own forward pass makes logits of hidden states alone."""
    import torch

    name, vocab = type(inner).__name__, inner.config.vocab_size
    width = inner.get_output_embeddings().weight.shape[1]
    try:
        with torch.no_grad():
            logits = head_of(inner)(torch.zeros((8, width), device="meta"))
    except Exception as error:
        why = f"its output layer cannot be computed alone: {type(error).__name__}: {error}".splitlines()[0]
        raise _refusal(name, why) from error
    if tuple(logits.shape) != (8, vocab):
        raise _refusal(name, f"its head makes {tuple(logits.shape)[-1]} logits of a vocabulary of {vocab}")


def _with_buffers(inner: Any) -> Any:
    """The model with memory for its buffers alone."""
    import torch

    for module in inner.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    return inner


# The published tensors


def _conversions(inner: Any) -> list[Any]:
    """How transformers changes the tensors of the files to its own, or renames them."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return get_model_conversion_mapping(inner, add_legacy=False)


def _changed_tensors(inner: Any) -> Iterator[str]:
    """Ways in which transformers changes the tensors of the files, other than naming them and stacking experts.

    It keeps them by model type. One that makes no tensor of this model (a Granite 4 without experts) changes nothing.
    """
    names = list(inner.state_dict())
    for change in _conversions(inner):
        targets, sources = (list(getattr(change, f"{side}_patterns")) for side in ("target", "source"))
        operations = [type(operation).__name__ for operation in getattr(change, "operations", ())]
        if not operations or not any(_is_made(name, target) for target in targets for name in names):
            continue
        stack = next((stack for stack in STACKS if len(targets) == 1 and targets[0].endswith(stack)), None)
        expected = dict(zip(STACKS, STACKING, strict=True)).get(stack or "")
        if stack is None or operations != expected or len(sources) != len(STACKS[stack]):
            yield f"transformers makes {targets[0]} of {', '.join(sources)}, which rlctl does not follow"


def _is_made(name: str, target: str) -> bool:
    """Whether a conversion's target can be in a tensor's name; the target may hold a number of an expert or a group of
    what it was made from."""
    pattern = re.escape(target).replace(re.escape("*"), ".*").replace(re.escape(r"\1"), ".*")
    return re.search(pattern, name) is not None


def listed_tensors(inner: Any) -> Iterator[ListedTensor]:
    """The published tensors that the parameters are made of."""
    own_path, layers = re.compile(rf"^{re.escape(layers_path(inner))}\.(\d+)\."), dict[ListedTensor, list[int]]()
    stacked = stacked_names(inner)
    held = dict(inner.named_parameters()) | _stored_buffers(inner)
    published = plain_names(inner, {name: value for name, value in held.items() if name not in stacked})
    roles: dict[str, Role] = {f"{head_path(inner)}.weight": Role.HEAD, _embedding_name(inner): Role.EMBEDDING}
    roles |= dict.fromkeys(_stored_buffers(inner), Role.EXPERT_BIAS)
    for module, parameter in held.items():
        found = own_path.match(module)
        layer = int(found[1]) if found else None
        shape, path = tuple(parameter.shape), _template(module, layer)
        if names := stacked.get(module):
            shape = (shape[1] // len(names), shape[2])
        for full_name, role in names.items() if names else [(published[module], roles.get(module, ""))]:
            name = _template(full_name, layer)
            tensor = ListedTensor(name, shape, module="" if path == name else path, role=str(role))
            layers.setdefault(tensor, []).extend([] if layer is None else [layer])
    for tensor, own in layers.items():
        yield replace(tensor, layers=tuple(own))


def _embedding_name(inner: Any) -> str:
    table = inner.get_input_embeddings()
    return next((f"{path}.weight" for path, module in inner.named_modules() if module is table), "")


def _template(name: str, layer: int | None) -> str:
    """A tensor's name with `{layer}` in place of the layer's number."""
    return name if layer is None else re.sub(rf"(^|\.){layer}(?=\.)", r"\1{layer}", name, count=1)


def plain_names(inner: Any, held: dict[str, Any]) -> dict[str, str]:
    """Parameter or buffer -> the name under which it is published, of those that are published as they are."""
    from transformers.core_model_loading import revert_weight_conversion

    own = {id(value): name for name, value in held.items()}
    return {own[id(value)]: name for name, value in revert_weight_conversion(inner, dict(held)).items()}


def stacked_names(inner: Any) -> dict[str, dict[str, Role]]:
    """Parameter of all experts of a layer -> the published tensors, with `{expert}`, and the role of each.

    transformers itself takes small tensors apart, whose values say what they stand for.
    """
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    targets = [target for change in _conversions(inner) if hasattr(change, "operations") for target in
               change.target_patterns]  # fmt: skip
    codes, meanings = dict[str, Any](), list[tuple[str, int, Role]]()
    for name, parameter in inner.named_parameters():
        roles = next((roles for stack, roles in STACKS.items() if name.endswith(stack)), ())
        if roles and any(_is_made(name, target) for target in targets):
            own = [(name, expert, role) for expert in range(parameter.shape[0]) for role in roles]
            codes[name] = len(meanings) + torch.arange(len(own)).view(-1, len(roles), 1)
            meanings += own
    found: dict[str, dict[str, Role]] = {name: {} for name in codes}
    for published, value in revert_weight_conversion(inner, codes).items() if codes else ():
        name, expert, role = meanings[int(value.reshape(-1)[0])]
        found[name][re.sub(rf"\.experts\.{expert}\.", ".experts.{expert}.", published)] = role
    for name, names in found.items():
        if len(names) != len(set(names.values())):
            raise _refusal(type(inner).__name__, f"how {name} is published cannot be followed")
    return found


def _moe(inner: Any, listed: tuple[ListedTensor, ...]) -> MoeFacts | None:
    """Experts, where transformers stacks them."""
    gates = [tensor for tensor in listed if tensor.role == Role.EXPERT_GATE]
    if not gates:
        return None
    with_experts = {layer for tensor in gates for layer in tensor.layers}
    first = gates[0].module.format(layer=gates[0].layers[0])
    dense = tuple(i for i in range(len(layers_of(inner))) if i not in with_experts)
    experts = inner.get_parameter(first).shape[0]
    return MoeFacts(experts, int(inner.config.num_experts_per_tok), gates[0].shape[0], dense_layers=dense)


def _main(directory: str) -> None:
    try:
        answer = asdict(describe(Path(directory)))
    except InputError as error:
        answer = {"message": error.message, "hint": error.hint}
    print(json.dumps(answer))


if __name__ == "__main__":
    _main(sys.argv[1])
