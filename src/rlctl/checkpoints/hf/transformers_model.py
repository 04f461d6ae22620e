"""The model that transformers builds of a configuration, without memory for its weights; and, where a family has no
file in `models/`, the facts that follow from it, or why it cannot be trained.

A process without torch has the facts found by another one, which runs this file: the driver does without torch.
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.checkpoints.hf.hf_files import read_config
from rlctl.errors import InputError
from rlctl.models.catalog import facts_of
from rlctl.models.facts import ListedTensor, ModelFacts, MoeFacts
from rlctl.models.families import facts_from_hf_config, other_architecture

if TYPE_CHECKING:
    from torch import Tensor

WATCHED = "rlctl_watched"
"""The name of an attention that computes nothing and notes how it is called."""
LAYER = re.compile(r"^model\.layers\.(\d+)\.")
STACKED = {
    "mlp.experts.gate_up_proj": ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"),
    "mlp.experts.down_proj": ("mlp.experts.{expert}.down_proj.weight",),
}
"""Modules that transformers makes of one published tensor for each expert (Qwen2-MoE's way)."""
ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention"})
FIXED_ROPE = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
"""Rotary embeddings whose frequencies do not depend on the length of a row."""
UNDERSTOOD = frozenset({
    "scaling", "dropout", "sliding_window", "s_aux", "softcap", "row", "is_causal", "position_ids", "use_cache",
    "cache_position", "output_attentions", "output_hidden_states", "output_router_logits", "position_embeddings",
})  # fmt: skip
"""Arguments with which `row_attention` of the dtensor backend computes, and others that change nothing."""
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
    listed = tuple(ListedTensor(t["name"], tuple(t["shape"]), tuple(t["layers"])) for t in answer.pop("listed"))
    plain = {key: value for key, value in answer.items() if value is not None}
    return facts_of(plain | {"listed": listed})


def meta_model(directory: Path, attention: str, *, headless: bool = False) -> Any:
    """The transformers model of a directory's configuration, without memory for its tensors, and `headless` without an
    output layer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = copy.deepcopy(AutoConfig.from_pretrained(directory))
    config.tie_word_embeddings = config.tie_word_embeddings and not headless
    with torch.device("meta"):
        inner = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    if headless:
        del inner.lm_head
    return inner


def head_of(inner: Any) -> Callable[[Tensor], Tensor]:
    """From hidden states [U, H] of the last norm to logits [U, V]: whatever the model's own forward pass does behind
    its layers, such as scaling and capping."""
    from torch import nn
    from transformers.modeling_outputs import MoeModelOutputWithPast

    class Given(nn.Module):
        """Stands where the layers are, and hands on what it is given."""

        def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> MoeModelOutputWithPast:
            return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)  # type: ignore[arg-type]

    head = copy.copy(inner)
    head._modules = {**inner._modules, "model": Given()}
    return lambda hidden_UH: head(inputs_embeds=hidden_UH[None], use_cache=False).logits[0]


def fill_buffers(inner: Any) -> None:
    """Compute buffers that no checkpoint holds, such as rotary frequencies, of which a model that was built without
    memory has no values. Raises InputError for one that transformers cannot compute anew."""
    import torch

    stored = inner.state_dict().keys()
    computed = {name: buffer for name, buffer in inner.named_buffers() if name not in stored}
    truths = {name: buffer for name, buffer in computed.items() if buffer.dtype == torch.bool}
    with torch.no_grad():
        for buffer in computed.values():
            buffer.fill_(_no_value(buffer))  # so that one which transformers leaves out is found
        _compute_buffers(inner)
        first = {name: buffer.clone() for name, buffer in truths.items()}
        for buffer in truths.values():  # no truth value says that there is none: one that was set is set again
            buffer.logical_not_()
        if truths:
            _compute_buffers(inner)
    for name, buffer in computed.items():
        unset = buffer != first[name] if name in first else _is_unset(buffer)
        if unset.any():
            why = f"training.backend = dtensor: transformers does not say how to compute {name} of this model."
            raise InputError(why, "Use --backend megatron.")


def _compute_buffers(inner: Any) -> None:
    for module in inner.modules():
        if not list(module.buffers(recurse=False)):
            continue
        if not list(module.parameters(recurse=False)):
            inner._init_weights(module)
        elif hasattr(module, "embed_scale"):  # Gemma's embedding
            module.embed_scale.fill_(module.scalar_embed_scale)


def _no_value(buffer: Tensor) -> float:
    """A number that stands for none in a buffer: the largest where whole numbers are in it (0 may be meant)."""
    import torch

    whole = not (buffer.is_floating_point() or buffer.is_complex() or buffer.dtype == torch.bool)
    return torch.iinfo(buffer.dtype).max if whole else torch.nan


def _is_unset(buffer: Tensor) -> Tensor:
    number = _no_value(buffer)
    return buffer.isnan() if number != number else buffer == number


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
    try:
        inner = meta_model(directory, WATCHED)
    except (ValueError, KeyError, OSError, ImportError, AttributeError, TypeError) as error:
        if error.args == (WATCHED,):  # the model looks its attention up in a table of its own
            name = other_architecture(read_config(directory))
            why = "its layers do not go through transformers' attention interface"
            raise InputError(f"{name} has no file in rlctl, and cannot be trained without one: {why}.", NEXT) from error
        why = f"{directory}: transformers cannot build this model: {type(error).__name__}: {error}"
        raise InputError(why.splitlines()[0], NEXT) from error
    name = type(inner).__name__
    if why := next(_problems(inner), None):
        raise InputError(f"{name} has no file in rlctl, and cannot be trained without one: {why}.", NEXT)
    _call(inner, name, calls)
    fill_buffers(_with_buffers(inner))
    config, listed = inner.config, tuple(_listed(inner))
    windows = {int(window) for call in calls if (window := call.told.get("sliding_window")) is not None}
    full = tuple(i for i, call in enumerate(calls) if call.told.get("sliding_window") is None)
    return ModelFacts(
        family=name,
        layers=len(calls),
        hidden=int(config.hidden_size),
        heads=calls[0].query[1],
        kv_heads=calls[0].key[1],
        head_dim=calls[0].query[-1],
        intermediate=int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size),
        vocab=int(config.vocab_size),
        max_length=int(getattr(config, "max_position_embeddings", None) or 2048),
        tied_embeddings=not any(tensor.name == "lm_head.weight" for tensor in listed),
        moe=_moe(inner),
        sliding_window=max(windows, default=None),
        full_attention_layers=full if windows else None,
        listed=listed,
    )


def _problems(inner: Any) -> Iterator[str]:
    """Why a model cannot be trained on packed rows, or its tensors not be followed into an engine."""
    from torch import Tensor, nn

    names = [name for name, _ in inner.named_parameters()]
    strange = [name for name in names if not name.startswith(("model.", "lm_head."))]
    if strange or not isinstance(getattr(inner.model, "layers", None), nn.ModuleList):
        yield f"its layers and its head are not where most models have them ({(strange or names)[0]})"
    if kept := [name for name in inner.state_dict() if name in dict(inner.named_buffers())]:
        yield f"{kept[0]} is stored and not trained"
    kinds = set(getattr(inner.config, "layer_types", None) or ()) - ATTENTION_KINDS
    kinds |= {type(module).__name__ for module in inner.modules() if isinstance(module, nn.modules.conv._ConvNd)}
    if kinds:
        yield f"its layers mix tokens by {min(kinds)}, which does not know where a packed row's rollouts begin"
    ropes = {rope for module in inner.modules() for rope in _rope_types(module)} - FIXED_ROPE
    if ropes:
        yield f"its rotary frequencies ({min(ropes)}) depend on the longest rollout of a row"
    for path, module in inner.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and not key.endswith("original_inv_freq"):
                yield f"{path}.{key} is neither a parameter nor a buffer, and has no values"
    yield from _changed_tensors(inner)


def _rope_types(module: Any) -> Iterator[str]:
    kinds = getattr(module, "rope_type", None)
    yield from (kinds.values() if isinstance(kinds, dict) else [kinds] if isinstance(kinds, str) else [])


def _changed_tensors(inner: Any) -> Iterator[str]:
    """Ways in which transformers changes the tensors of the files, other than stacking experts as Qwen2-MoE does.

    It keeps them by model type. One that makes no tensor of this model (a Granite 4 without experts) changes nothing.
    """
    from transformers.conversion_mapping import extract_weight_conversions_for_model

    names = list(inner.state_dict())
    for change in extract_weight_conversions_for_model(inner) or ():
        targets, sources = (list(getattr(change, f"{side}_patterns")) for side in ("target", "source"))
        if not any(_is_made(name, target) for target in targets for name in names):
            continue
        expected = [name.format(expert="*") for target in targets for name in STACKED.get(target, ())]
        if sources != expected:
            yield f"transformers makes {targets[0]} of {', '.join(sources)}, which rlctl does not follow"


def _is_made(name: str, target: str) -> bool:
    """Whether a conversion's target can be in a tensor's name; the target may hold a number of an expert or a group of
    what it was made from."""
    pattern = re.escape(target).replace(re.escape("*"), ".*").replace(re.escape(r"\1"), ".*")
    return re.search(pattern, name) is not None


def _watch() -> list[Call]:
    """Register the attention that is watched; its calls will be in the list."""
    from transformers import AttentionInterface

    calls: list[Call] = []

    def watched(module: Any, query: Any, key: Any, value: Any, mask: Any = None, **told: Any) -> tuple[Any, None]:
        calls.append(Call(module, tuple(query.shape), tuple(key.shape), mask, told))
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    AttentionInterface.register(WATCHED, watched)
    return calls


def _call(inner: Any, name: str, calls: list[Call]) -> None:
    """Have each layer call its attention. Raises InputError where one does so in a way that is not understood."""
    import torch

    for module in inner.modules():
        if any(parameter.dim() > 2 for parameter in module.parameters(recurse=False)):
            module.forward = lambda tokens, *_, **__: torch.zeros_like(tokens)  # experts look at values
    tokens, row = torch.zeros((1, 8), dtype=torch.long, device="meta"), object()
    try:
        with torch.no_grad():
            found = inner.model(input_ids=tokens, position_ids=tokens, use_cache=False, row=row).last_hidden_state
            logits = head_of(inner)(found[0])
    except Exception as error:
        why = f"its forward pass cannot be followed: {type(error).__name__}: {error}".splitlines()[0]
        raise InputError(f"{name} has no file in rlctl, and cannot be trained without one: {why}.", NEXT) from error
    why = next(_strange_calls(calls, len(inner.model.layers), row), None)
    if tuple(logits.shape) != (8, inner.config.vocab_size):
        why = f"its head makes {tuple(logits.shape)[-1]} logits of a vocabulary of {inner.config.vocab_size}"
    if why:
        raise InputError(f"{name} has no file in rlctl, and cannot be trained without one: {why}.", NEXT)


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


def _with_buffers(inner: Any) -> Any:
    """The model with memory for its buffers alone."""
    import torch

    for module in inner.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    return inner


def _listed(inner: Any) -> Iterator[ListedTensor]:
    """The published tensors that the parameters are made of."""
    layers: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for name, parameter in inner.named_parameters():
        found, shape = LAYER.match(name), tuple(parameter.shape)
        prefix = "model.layers.{layer}." if found else ""
        rest = name[found.end() :] if found else name
        halves = len(STACKED.get(rest, ()))
        if halves:  # [E, 2 I, H] or [E, H, I]
            shape = (shape[1] // halves, shape[2])
        for tensor in STACKED.get(rest, (rest,)):
            layers.setdefault((prefix + tensor, shape), []).extend([int(found[1])] if found else [])
    for (name, shape), own in layers.items():
        yield ListedTensor(name, shape, tuple(own))


def _moe(inner: Any) -> MoeFacts | None:
    """Experts, where transformers stacks them."""
    stacks = {name: p for name, p in inner.named_parameters() if name.endswith("mlp.experts.gate_up_proj")}
    if not stacks:
        return None
    with_experts = {int(name.split(".")[2]) for name in stacks}
    experts, halves, _ = next(iter(stacks.values())).shape
    dense = tuple(i for i in range(len(inner.model.layers)) if i not in with_experts)
    return MoeFacts(experts, int(inner.config.num_experts_per_tok), halves // 2, dense_layers=dense)


def _main(directory: str) -> None:
    try:
        answer = asdict(describe(Path(directory)))
    except InputError as error:
        answer = {"message": error.message, "hint": error.hint}
    print(json.dumps(answer))


if __name__ == "__main__":
    _main(sys.argv[1])
