"""Changes of a reference sub-layer, each a usual mistake of trainers, engines and converters. A change that makes the
reference compute what a program computed is the likely cause of the difference.

Changes need no table of models: they look for attributes and parameters that transformers' modules have in common.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlctl.divergence.reference import SubLayer

EPSILONS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-12)
THETAS = (1e4, 1e5, 1.5e5, 5e5, 1e6, 5e6, 1e7)
SCALES = (0.25, 0.5, math.sqrt(0.5), math.sqrt(2), 2.0, 4.0)
MOST_PAIRS = 8
"""Experts up to which all exchanges of two are tried."""
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "SiLU": F.silu,
    "GELU": F.gelu,
    "GELU by tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick GELU": lambda x: x * torch.sigmoid(1.702 * x),
    "ReLU": F.relu,
}


class Edits(ExitStack):
    """Changes of objects that the end of the block undoes."""

    def put(self, owner: Any, name: str, value: Any) -> None:
        self.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    def weigh(self, parameter: nn.Parameter | Tensor, values: Tensor) -> None:
        """Give a parameter other values."""
        before = parameter.data
        self.callback(setattr, parameter, "data", before)
        parameter.data = values.to(before.dtype).contiguous()

    def call_with(self, sublayer: SubLayer, name: str, value: Callable[[Any], Any]) -> None:
        """Change a keyword argument wherever a module gets it."""
        for call in itertools.chain.from_iterable(sublayer.calls):
            if call.kwargs.get(name) is not None:
                self.put(call, "kwargs", {**call.kwargs, name: value(call.kwargs[name])})

    def forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        module.forward = forward
        self.callback(delattr, module, "forward")


@dataclass(frozen=True)
class Change:
    """One hypothesis about a sub-layer."""

    operation: str
    """The part of the sub-layer."""
    words: str
    """What the program does, for a message."""
    apply: Callable[[Edits, SubLayer], None]


def changes(sublayer: SubLayer) -> Iterator[Change]:
    """Yield the changes that a sub-layer can have, likely ones first."""
    for listed in (
        _other_weights, _matrices, _experts, _routers, _norms, _biases, _attention, _rotary, _activations,
        _missing_parts,
    ):  # fmt: skip
        yield from listed(sublayer)


# --- modules by what they have


def named(sublayer: SubLayer) -> dict[str, nn.Module]:
    """All modules of a sub-layer by their paths."""
    return {
        f"{path}.{name}" if name else path: module
        for path, whole in sublayer.modules.items()
        for name, module in whole.named_modules()
    }


def _with(sublayer: SubLayer, attribute: str, kind: type = object) -> dict[str, Any]:
    owners = {path: getattr(module, attribute, None) for path, module in named(sublayer).items()}
    return {
        path: named(sublayer)[path] for path, value in owners.items() if value is not None and isinstance(value, kind)
    }


def _short(path: str) -> str:
    """A path without the model and the layer."""
    parts = path.split(".")
    numbered = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbered[0] + 1 :] if numbered else parts[-1:])


def _linears(sublayer: SubLayer) -> dict[str, nn.Linear]:
    return {path: module for path, module in named(sublayer).items() if isinstance(module, nn.Linear)}


# --- weights


def _other_weights(sublayer: SubLayer) -> Iterator[Change]:
    """Weights of another layer, or of an earlier version of the model."""
    for owner, other in sublayer.others.items():
        ours, values = _parameters(sublayer), _parameters(other)
        if [value.shape for _, value in values] != [value.shape for _, value in ours]:
            continue
        groups = {"": [*range(len(ours))]}
        for path in sublayer.modules:
            groups[f"{_short(path)} "] = [place for place, (name, _) in enumerate(ours) if name.startswith(f"{path}.")]
        groups |= {f"{_short(name)} ": [place] for place, (name, _) in enumerate(ours)}
        for whose, places in groups.items():

            def take(edits: Edits, live: SubLayer, places: Sequence[int] = places, other: SubLayer = other) -> None:
                live_parameters, values = _parameters(live), _parameters(other)
                for place in places:
                    edits.weigh(live_parameters[place][1], values[place][1].detach())

            yield Change("weights", f"{whose}has the weights of {owner}", take)


def _parameters(sublayer: SubLayer) -> list[tuple[str, nn.Parameter]]:
    return [
        (f"{path}.{name}", parameter)
        for path, module in sublayer.modules.items()
        for name, parameter in module.named_parameters()
    ]


def _matrices(sublayer: SubLayer) -> Iterator[Change]:
    linears = _linears(sublayer)
    for (one, first), (other, second) in itertools.combinations(linears.items(), 2):
        if first.weight.shape == second.weight.shape and "expert" not in one + other:

            def exchange(edits: Edits, live: SubLayer, one: str = one, other: str = other) -> None:
                live_linears = _linears(live)
                values = live_linears[one].weight.data, live_linears[other].weight.data
                edits.weigh(live_linears[one].weight, values[1])
                edits.weigh(live_linears[other].weight, values[0])

            yield Change("matrix", f"{_short(one)} and {_short(other)} are exchanged", exchange)
    for path, linear in linears.items():
        if linear.in_features == linear.out_features:

            def transpose(edits: Edits, live: SubLayer, path: str = path) -> None:
                weight = _linears(live)[path].weight
                edits.weigh(weight, weight.data.T)

            yield Change("matrix", f"{_short(path)} is transposed", transpose)
        if "gate_up" in path:
            halves = _rows_of_halves(linear.out_features)
            yield Change("matrix", f"gate and up are exchanged in {_short(path)}", _reordered(path, halves))


def _rows_of_halves(count: int) -> list[int]:
    return [*range(count // 2, count), *range(count // 2)]


def _reordered(path: str, order: Sequence[int]) -> Callable[[Edits, SubLayer], None]:
    def apply(edits: Edits, live: SubLayer) -> None:
        linear = _linears(live)[path]
        edits.weigh(linear.weight, linear.weight.data[list(order)])
        if linear.bias is not None:
            edits.weigh(linear.bias, linear.bias.data[list(order)])

    return apply


def _stacks(sublayer: SubLayer) -> dict[str, nn.Module]:
    """Modules that hold the matrices of several experts."""
    return {
        path: module
        for path, module in named(sublayer).items()
        if any(value.dim() == 3 for value in module.parameters(recurse=False))
    }


def _experts(sublayer: SubLayer) -> Iterator[Change]:
    for path, module in _stacks(sublayer).items():
        stacked = dict(module.named_parameters(recurse=False))
        count = len(next(value for value in stacked.values() if value.dim() == 3))
        for words, order in _orders(count):

            def permute(edits: Edits, live: SubLayer, path: str = path, order: Sequence[int] = order) -> None:
                for value in named(live)[path].parameters(recurse=False):
                    edits.weigh(value, value.data[list(order)])

            yield Change("experts", f"experts are {words}", permute)
        for name, value in stacked.items():
            if value.dim() == 3 and value.shape[1] == value.shape[2]:

                def transpose(edits: Edits, live: SubLayer, path: str = path, name: str = name) -> None:
                    matrix = getattr(named(live)[path], name)
                    edits.weigh(matrix, matrix.data.transpose(1, 2))

                yield Change("experts", f"{name} of the experts is transposed", transpose)
        if "gate_up_proj" in stacked:
            yield from _gates_and_ups(path, module)


def _gates_and_ups(path: str, module: Any) -> Iterator[Change]:
    """gpt-oss has gates in even columns and ups in odd ones; other models have two halves of rows."""
    alternates = hasattr(module, "gate_up_proj_bias")
    wide = module.gate_up_proj.shape[2 if alternates else 1]
    halves = _rows_of_halves(wide)
    swapped = [place ^ 1 for place in range(wide)]
    apart = [*range(0, wide, 2), *range(1, wide, 2)]
    orders = {"exchanged": swapped if alternates else halves}
    orders |= {"read as halves": apart} if alternates else {"read alternating": apart}

    for words, order in orders.items():

        def reorder(edits: Edits, live: SubLayer, order: Sequence[int] = order) -> None:
            experts: Any = named(live)[path]
            values = experts.gate_up_proj.data
            edits.weigh(experts.gate_up_proj, values[:, :, list(order)] if alternates else values[:, list(order)])
            if alternates:
                edits.weigh(experts.gate_up_proj_bias, experts.gate_up_proj_bias.data[:, list(order)])

        yield Change("experts", f"gate and up of the experts are {words}", reorder)


def _orders(count: int) -> Iterator[tuple[str, list[int]]]:
    natural = list(range(count))
    orders = {"in reverse order": natural[::-1], "in the order of their names as text": sorted(natural, key=str)}
    orders |= {f"shifted by {by}": natural[by:] + natural[:by] for by in (1, count - 1)}
    orders |= {"exchanged in pairs": [expert ^ 1 for expert in natural]} if count % 2 == 0 else {}
    for one, other in itertools.combinations(natural, 2) if count <= MOST_PAIRS else ():
        exchanged = natural.copy()
        exchanged[one], exchanged[other] = other, one
        orders[f"exchanged ({one} and {other})"] = exchanged
    yield from ((words, order) for words, order in orders.items() if order != natural)


# --- routers


def _routers(sublayer: SubLayer) -> Iterator[Change]:
    for path, router in _with(sublayer, "top_k", int).items():
        if not isinstance(getattr(router, "weight", None), Tensor):
            continue  # the block around it
        attributes: list[tuple[str, Any, str]] = [
            ("top_k", router.top_k + 1, "chooses one expert more"),
            ("top_k", router.top_k - 1, "chooses one expert less"),
            ("routed_scaling_factor", 1.0, "does not scale the experts' weights"),
        ]
        if (normalizes := getattr(router, "norm_topk_prob", None)) is not None:
            words = (
                "does not normalize the chosen experts' weights" if normalizes else "normalizes the experts' weights"
            )
            attributes.insert(0, ("norm_topk_prob", not normalizes, words))
        if getattr(router, "num_group", 1) > 1:
            attributes.append(("num_group", 1, "chooses without groups of experts"))
            attributes.append(("topk_group", 1, "chooses from one group of experts"))
        for name, value, words in attributes:
            if hasattr(router, name) and getattr(router, name) != value and (value or isinstance(value, bool)):
                yield Change("router", f"the router {words}", _attribute(path, name, value))
        if getattr(router, "e_score_correction_bias", None) is not None:
            yield Change("router", "the router chooses without its bias", _zeroed(path, "e_score_correction_bias"))
        for words, rescored in RESCORED.items():
            yield Change("router", f"the router {words}", _rescoring(path, rescored))


def _softmax_of_all(logits: Tensor, scores: Tensor, indices: Tensor) -> Tensor:
    return logits.softmax(-1).gather(-1, indices)


def _softmax_of_chosen(logits: Tensor, scores: Tensor, indices: Tensor) -> Tensor:
    return logits.gather(-1, indices).softmax(-1)


def _sigmoids(logits: Tensor, scores: Tensor, indices: Tensor) -> Tensor:
    return logits.gather(-1, indices).sigmoid()


def _alike(logits: Tensor, scores: Tensor, indices: Tensor) -> Tensor:
    return torch.full_like(scores, 1 / scores.shape[-1])


RESCORED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "weighs experts by a softmax over all experts, not normalized": _softmax_of_all,
    "weighs experts by a softmax over the chosen experts": _softmax_of_chosen,
    "weighs experts by sigmoids, not normalized": _sigmoids,
    "weighs the chosen experts alike": _alike,
}


def _rescoring(path: str, rescored: Callable[..., Tensor]) -> Callable[[Edits, SubLayer], None]:
    def apply(edits: Edits, live: SubLayer) -> None:
        router = named(live)[path]
        plain = router.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            logits, scores, indices = plain(*args, **kwargs)
            return logits, rescored(logits, scores, indices).to(scores.dtype), indices

        edits.forward(router, forward)

    return apply


# --- norms, biases, activations


def _norms(sublayer: SubLayer) -> Iterator[Change]:
    norms = {
        path: name
        for name in ("variance_epsilon", "eps")
        for path in _with(sublayer, name, float)
        if "Norm" in type(named(sublayer)[path]).__name__
    }
    for epsilon in EPSILONS:
        differing = [path for path, name in norms.items() if getattr(named(sublayer)[path], name) != epsilon]
        for paths in ([differing] if len(differing) > 1 else []) + [[path] for path in differing]:

            def set_all(edits: Edits, live: SubLayer, paths: Sequence[str] = paths, value: float = epsilon) -> None:
                for path in paths:
                    edits.put(named(live)[path], norms[path], value)

            whose = f"{' and '.join(map(_short, paths))} {'have' if len(paths) > 1 else 'has'}"
            yield Change("norm", f"{whose} the epsilon {epsilon:g}", set_all)
    inner = [path for path in norms if path not in sublayer.modules]
    for paths in ([inner] if len(inner) > 1 else []) + [[path] for path in norms]:

        def skip(edits: Edits, live: SubLayer, paths: Sequence[str] = paths) -> None:
            for path in paths:
                edits.forward(named(live)[path], lambda hidden: hidden)

        missing = " and ".join(map(_short, paths))
        yield Change("norm", f"{missing} {'are' if len(paths) > 1 else 'is'} missing", skip)
    for path, by in itertools.product(norms, (1.0, -1.0)):

        def move(edits: Edits, live: SubLayer, path: str = path, by: float = by) -> None:
            weight: Any = named(live)[path].weight
            edits.weigh(weight, weight.data + by)

        more = "one is added to" if by > 0 else "one is subtracted from"
        yield Change("norm", f"{more} the weight of {_short(path)}", move)


def _biases(sublayer: SubLayer) -> Iterator[Change]:
    biased = [path for path, linear in _linears(sublayer).items() if linear.bias is not None]
    for paths in ([biased] if len(biased) > 1 else []) + [[path] for path in biased]:

        def drop(edits: Edits, live: SubLayer, paths: Sequence[str] = paths) -> None:
            for path in paths:
                edits.put(_linears(live)[path], "bias", None)

        yield Change("bias", f"{' and '.join(map(_short, paths))} without bias", drop)
    qkv = [path for path in biased if path.endswith(("q_proj", "k_proj", "v_proj"))]
    if 1 < len(qkv) < len(biased):

        def drop_qkv(edits: Edits, live: SubLayer) -> None:
            for path in qkv:
                edits.put(_linears(live)[path], "bias", None)

        yield Change("bias", "queries, keys and values without biases", drop_qkv)
    for path, module in named(sublayer).items():
        for name, _ in module.named_parameters(recurse=False):
            if "bias" in name and not isinstance(module, nn.Linear) and not name.startswith("e_score"):
                yield Change("bias", f"{_short(path)}.{name} is missing", _zeroed(path, name))


def _activations(sublayer: SubLayer) -> Iterator[Change]:
    owners = list(_with(sublayer, "act_fn"))
    for words, function in ACTIVATIONS.items() if owners else ():

        def use(edits: Edits, live: SubLayer, function: Callable[[Tensor], Tensor] = function) -> None:
            for path in owners:
                owner: Any = named(live)[path]
                if isinstance(owner.act_fn, nn.Module):
                    edits.forward(owner.act_fn, function)
                else:
                    edits.put(owner, "act_fn", function)

        yield Change("activation", f"the activation is {words}", use)
    for path in _with(sublayer, "limit", float):
        yield Change("activation", "the activation has no limit", _attribute(path, "limit", math.inf))


def _missing_parts(sublayer: SubLayer) -> Iterator[Change]:
    for path in named(sublayer):
        if path.rpartition(".")[2] in ("shared_experts", "shared_expert", "shared_mlp"):
            yield Change(
                "shared experts",
                "shared experts are missing",
                lambda edits, live, p=path: edits.forward(named(live)[p], lambda hidden, *_: torch.zeros_like(hidden)),
            )


def _attribute(path: str, name: str, value: Any) -> Callable[[Edits, SubLayer], None]:
    return lambda edits, live: edits.put(named(live)[path], name, value)


def _zeroed(path: str, name: str) -> Callable[[Edits, SubLayer], None]:
    def apply(edits: Edits, live: SubLayer) -> None:
        value = getattr(named(live)[path], name)
        edits.weigh(value, torch.zeros_like(value.data))

    return apply


# --- attention


def _attention(sublayer: SubLayer) -> Iterator[Change]:
    config = sublayer.config
    for path, module in _with(sublayer, "scaling", float).items():
        usual = {"1 / sqrt(head width)": getattr(module, "head_dim", 0) or getattr(module, "qk_head_dim", 0)}
        usual |= {"1 / sqrt(hidden size)": config.hidden_size, "1": 1}
        usual |= {"1 / sqrt(query_pre_attn_scalar)": getattr(config, "query_pre_attn_scalar", None) or 0}
        values = {f"{words} = {width**-0.5:.4g}": width**-0.5 for words, width in usual.items() if width}
        values |= {f"{factor:.4g} times the model's": factor * module.scaling for factor in SCALES}
        for words, value in values.items():
            if not math.isclose(value, module.scaling, rel_tol=1e-6):
                yield Change("attention scale", f"the attention scale is {words}", _attribute(path, "scaling", value))
    yield from _windows(sublayer)
    for path in _with(sublayer, "attn_logit_softcapping", float):
        change = _attribute(path, "attn_logit_softcapping", None)
        yield Change("attention", "attention logits are not capped", change)
    for path in _with(sublayer, "sinks", Tensor):

        def close(edits: Edits, live: SubLayer, path: str = path) -> None:
            sinks: Any = named(live)[path].sinks
            edits.weigh(sinks, torch.full_like(sinks.data, -1e30))

        yield Change("attention", "attention sinks are missing", close)


def _windows(sublayer: SubLayer) -> Iterator[Change]:
    masks = [call.kwargs.get("attention_mask") for call in itertools.chain.from_iterable(sublayer.calls)]
    lengths = [mask.shape[-1] for mask in masks if isinstance(mask, Tensor) and mask.dim() == 4]
    if not lengths:
        return
    window = getattr(sublayer.config, "sliding_window", None) or 0
    sizes = {"no sliding window": max(lengths)}
    sizes |= {f"a sliding window of {size}": size for size in (window - 1, window, window + 1) if window > 1}
    for words, size in sizes.items():

        def narrow(edits: Edits, live: SubLayer, size: int = size) -> None:
            edits.call_with(live, "attention_mask", lambda mask: _window_mask(mask, size))

        yield Change("sliding window", f"attention has {words}", narrow)
    yield Change(
        "attention mask",
        "tokens attend to later tokens",
        lambda edits, live: edits.call_with(live, "attention_mask", torch.zeros_like),
    )


def _window_mask(mask: Tensor, window: int) -> Tensor:
    """A causal mask like `mask` [1, 1, T, T] whose tokens attend to `window` tokens, themselves included."""
    ones = torch.ones(mask.shape[-2:], dtype=torch.bool)
    seen = ones.tril() & ~ones.tril(-window)
    return torch.zeros_like(mask).masked_fill(~seen, torch.finfo(mask.dtype).min)


# --- rotary embedding

Angles = tuple[Tensor, Tensor]
"""Cosines and sines [1, T, d] of a sequence; d is half the width in some models."""
ANGLES = "position_embeddings"


def _rotary(sublayer: SubLayer) -> Iterator[Change]:
    given = [call.kwargs[ANGLES] for call in itertools.chain.from_iterable(sublayer.calls) if ANGLES in call.kwargs]
    if not given or not (isinstance(given[0], tuple) and len(given[0]) == 2):
        return
    for words, angles in _other_angles(sublayer, given[0]):

        def turn(edits: Edits, live: SubLayer, angles: Callable[[Angles], Angles] = angles) -> None:
            edits.call_with(live, ANGLES, angles)

        yield Change("rotary embedding", words, turn)
    paths = [path for path in _linears(sublayer) if path.endswith(("q_proj", "k_proj"))]
    if len(paths) == 2:
        width = given[0][0].shape[-1] * (1 if _doubled(given[0][0]) else 2)
        yield Change("rotary embedding", "neighboring dimensions are rotated as pairs", _pairing(paths, width))


def _other_angles(sublayer: SubLayer, given: Angles) -> Iterator[tuple[str, Callable[[Angles], Angles]]]:
    parameters = getattr(sublayer.config, "rope_parameters", None) or {}
    kinds = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    thetas = dict.fromkeys((*(float(kind["rope_theta"]) for kind in kinds if "rope_theta" in kind), *THETAS))
    for number, theta in enumerate(thetas):
        words = "is without its scaling" if number < len(kinds) else "is another"
        yield f"the rotary embedding {words} (theta {theta:g})", _angles_of(theta, 1.0, scaled=False)
        yield f"the rotary embedding has theta {theta:g} and the model's factor", _angles_of(theta, 1.0, scaled=True)
        for factor in dict.fromkeys(float(kind["factor"]) for kind in kinds if "factor" in kind):
            yield f"positions are divided by {factor:g} (theta {theta:g})", _angles_of(theta, factor, scaled=False)
    yield "the rotary embedding is missing", lambda angles: (torch.ones_like(angles[0]), torch.zeros_like(angles[1]))
    size = float((given[0][0, 0].square() + given[1][0, 0].square()).sqrt()[0])
    if abs(size - 1) > 1e-4:
        yield "the rotary embedding is without its factor", lambda angles: (angles[0] / size, angles[1] / size)
        yield "the rotary embedding has its factor twice", lambda angles: (angles[0] * size, angles[1] * size)


def _doubled(cosines: Tensor) -> bool:
    half = cosines.shape[-1] // 2
    return cosines.shape[-1] % 2 == 0 and torch.equal(cosines[..., :half], cosines[..., half:])


def _angles_of(theta: float, factor: float, *, scaled: bool) -> Callable[[Angles], Angles]:
    def angles(given: Angles) -> Angles:
        cosines, sines = given
        doubled = _doubled(cosines)
        width = cosines.shape[-1] * (1 if doubled else 2)
        frequencies = 1 / (theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
        turns = torch.arange(cosines.shape[1], dtype=torch.float32)[:, None] / factor * frequencies
        turns = torch.cat((turns, turns), -1) if doubled else turns
        size = (cosines[0, 0].square() + sines[0, 0].square()).sqrt()[0] if scaled else 1.0
        return (turns.cos()[None] * size).to(cosines.dtype), (turns.sin()[None] * size).to(sines.dtype)

    return angles


def _pairing(paths: Sequence[str], width: int) -> Callable[[Edits, SubLayer], None]:
    """Order the rows of queries and keys so that halves of a head are what neighbors were."""
    order = torch.tensor([*range(0, width, 2), *range(1, width, 2)])

    def apply(edits: Edits, live: SubLayer) -> None:
        for path in paths:
            linear = _linears(live)[path]
            for value in [linear.weight] if linear.bias is None else [linear.weight, linear.bias]:
                heads = value.data.unflatten(0, (-1, width))
                edits.weigh(value, heads[:, order].flatten(0, 1))
            norm: Any = named(live).get(path.replace("_proj", "_norm"))
            if norm is not None and norm.weight.shape == order.shape:
                edits.weigh(norm.weight, norm.weight.data[order])

    return apply
