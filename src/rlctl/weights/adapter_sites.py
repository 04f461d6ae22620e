"""The sites of a run's adapters: the matrices that `training.lora` names, each with its rank and scale.

Names and patterns mean what they mean to PEFT (0.21, on transformers 5): `target_modules`, `target_parameters`,
`exclude_modules`, `rank_pattern` and `alpha_pattern`. Sources: peft/tuners/tuners_utils.py and
peft/utils/transformers_weight_conversion.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from rlctl.errors import ConfigError
from rlctl.models.facts import ModelFacts
from rlctl.models.families import weights_of
from rlctl.models.matrices import Role
from rlctl.models.peft_defaults import peft_targets
from rlctl.models.vision import VISION_FAMILIES
from rlctl.weights.dtensor import module_layout
from rlctl.weights.layout import Shape
from rlctl.weights.megatron_names import slot

if TYPE_CHECKING:
    from rlctl.settings.training import LoraConfig

ATTENTION = frozenset({Role.Q, Role.K, Role.V, Role.O, Role.MLA_Q, Role.MLA_Q_UP, Role.MLA_KV_UP})
MLP = frozenset({Role.GATE, Role.UP, Role.DOWN, Role.SHARED_GATE, Role.SHARED_UP, Role.SHARED_DOWN})
LATENT = frozenset({Role.MLA_Q_DOWN, Role.MLA_KV_DOWN})
EXPERTS = frozenset({Role.EXPERT_GATE, Role.EXPERT_UP, Role.EXPERT_DOWN, Role.EXPERT_STACK})
ADAPTABLE = ATTENTION | MLP | LATENT | EXPERTS | {Role.ROUTER, Role.OTHER}
GROUPS = {"attention": ATTENTION, "mlp": MLP}
"""The words of `training.lora.targets` that stand for kinds of matrices."""
ALL_LINEAR = "all-linear"
PEFT_DEFAULT = "peft-default"
"""The word of `training.lora.targets` for the layers that PEFT adapts where nobody names any."""
MLP_NAME = re.compile(r"mlp|feed_?forward|ffn|ff_layer|(?<![a-z])fc_?\d", re.IGNORECASE)
"""Names of MLPs in transformers. Other linear layers of families without a file count as attention."""
HEAD_NAME = "lm_head"
MATRIX = 2
FUSED = 2
"""Matrices of an expert that transformers 5 fuses: gate and up. PEFT doubles rank and alpha of an adapter on both."""


@dataclass(frozen=True)
class Place:
    """A matrix, or a stack of matrices, that can have an adapter."""

    param: str
    """The parameter of transformers' modules."""
    role: Role
    layer: int
    shape: Shape
    tensors: tuple[str, ...]
    """The published tensors that hold its rows, or its experts' rows."""
    fused: tuple[str, ...] = ()
    """Module names of its parts in transformers 4, if transformers 5 stacks experts."""
    megatron: str = ""
    """Megatron's name of the layer."""
    transposed: bool = False
    """Whether the stack has inputs before outputs."""
    linear: bool = True
    """Whether PEFT counts it as a linear layer: experts and routers that transformers 4 had as such."""

    @property
    def module(self) -> str:
        return self.param.removesuffix(".weight")

    @property
    def is_expert(self) -> bool:
        return bool(self.fused)

    @property
    def inputs(self) -> int:
        return self.shape[-2 if self.transposed else -1]

    def adapter_shapes(self, rank: int) -> tuple[Shape, Shape]:
        """The shapes of A [r, I] and B [O, r]; of experts [E, r, I] and [E, ..., O, r]."""
        experts = self.shape[:1] if self.is_expert else ()
        outputs = (self.shape[0], self.shape[-1]) if self.transposed else self.shape[:-1]
        return (*experts, rank, self.inputs), (*outputs, rank)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names that a pattern can match; one match suffices."""
        return tuple(dict.fromkeys(name for name in (self.module, self.param, self.megatron) if name))

    def is_matched(self, wanted: str | Iterable[str]) -> bool:
        """Whether names or a regular expression name it, or all of its parts."""
        return any(_matches(wanted, name) for name in self.names) or (
            bool(self.fused) and all(_matches(wanted, name) for name in self.fused)
        )

    def require_whole(self, wanted: str | Iterable[str]) -> None:
        """Raise ConfigError where targets name a part of a matrix."""
        named = [name for name in self.fused if _matches(wanted, name)]
        if named and not self.is_matched(wanted):
            lacking = next(name for name in self.fused if name not in named)
            raise ConfigError(
                f"training.lora.targets names {named[0]} without {lacking}, and transformers has both in one matrix "
                f"({self.module}), which an adapter is for.",
                "Name both, or leave the experts out with training.lora.exclude.",
            )


@dataclass(frozen=True)
class Site:
    """A place with an adapter: adds scale * B A to each of its matrices."""

    place: Place
    rank: int
    alpha: float
    scale: float

    @property
    def module(self) -> str:
        return self.place.module


@dataclass(frozen=True)
class Sites:
    """All sites of a model."""

    all: tuple[Site, ...]

    @cached_property
    def by_param(self) -> dict[str, Site]:
        return {site.place.param: site for site in self.all}

    @cached_property
    def by_tensor(self) -> dict[str, Site]:
        return {tensor: site for site in self.all for tensor in site.place.tensors}

    def are_alike(self, layers: int) -> bool:
        """Return whether each of the model's layers has the same adapters."""
        of_layer: dict[str, set[tuple[str, int]]] = {}
        for site in self.all:
            _, layer, name = re.split(r"\.(\d+)\.", site.module, maxsplit=1)
            of_layer.setdefault(layer, set()).add((name, site.rank))
        return len(of_layer) == layers and len(set(map(frozenset, of_layer.values()))) == 1


def sites(facts: ModelFacts, lora: LoraConfig) -> Sites:
    """Return the sites that settings name. Raises ConfigError for names and patterns of no layer."""
    targets = _with_default(facts, lora.targets if isinstance(lora.targets, str) else tuple(lora.targets))
    exclude = lora.exclude if isinstance(lora.exclude, str) else tuple(lora.exclude)
    ranks, alphas = tuple(lora.rank_pattern.items()), tuple(lora.alpha_pattern.items())
    return _sites(facts, lora.rank, lora.alpha, targets, exclude, ranks, alphas, lora.rslora)


def _with_default(facts: ModelFacts, targets: str | tuple[str, ...]) -> str | tuple[str, ...]:
    """Return targets with PEFT's names in place of `peft-default`. Raises ConfigError where PEFT has none, and nothing
    else is named; PEFT itself then raises."""
    entries = (targets,) if isinstance(targets, str) else targets
    if PEFT_DEFAULT not in entries:
        return targets
    named = (*peft_targets(facts.family), *(entry for entry in entries if entry != PEFT_DEFAULT))
    if not named:
        raise ConfigError(
            f"training.lora.targets = {PEFT_DEFAULT}: PEFT has no default layers for {facts.family}.",
            f"Name the layers ([q_proj, v_proj]), or set it to {ALL_LINEAR} or [attention, mlp].",
        )
    return named


@lru_cache(maxsize=32)
def _sites(
    facts: ModelFacts,
    rank: int,
    alpha: float,
    targets: str | tuple[str, ...],
    exclude: str | tuple[str, ...],
    ranks: tuple[tuple[str, int], ...],
    alphas: tuple[tuple[str, float], ...],
    rslora: bool,
) -> Sites:
    everywhere = places(facts)
    _require_names(everywhere, "exclude", exclude)
    _require_names(everywhere, "targets", targets)
    chosen = [place for place in everywhere if not place.is_matched(exclude) and _is_target(place, targets)]
    if not chosen:
        words = targets if isinstance(targets, str) else ", ".join(targets)
        raise ConfigError(
            f"training.lora.targets: the model has no layers for adapters of this name ({words})"
            f"{' that training.lora.exclude leaves' if exclude else ''}.",
            f"Name some of {_examples(everywhere)}, or set targets to {ALL_LINEAR}.",
        )
    for key, patterns in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
        for pattern, _ in patterns:
            if not any(by_pattern({pattern: True}, place.names, False) for place in chosen):
                raise ConfigError(
                    f"training.lora.{key}: {pattern} matches the end of no name of an adapted layer.",
                    f"Name some of {_examples(chosen)}, or a pattern of whole words.",
                )
    made = []
    for place in chosen:
        parts = FUSED if len(place.fused) == FUSED and not _names_it(targets, place) else 1
        site_rank = by_pattern(dict(ranks), place.names, parts * rank)
        site_alpha = by_pattern(dict(alphas), place.names, parts * alpha)
        scale = site_alpha / (math.sqrt(site_rank) if rslora else site_rank)
        made.append(Site(place, site_rank, site_alpha, scale))
    return Sites(tuple(made))


@lru_cache(maxsize=8)
def places(facts: ModelFacts) -> tuple[Place, ...]:
    """Return the places of a model's layers, in the order of its modules. Layers for multi-token prediction, which
    transformers does not have, and vision towers are none."""
    layout, matrices = module_layout(facts, "float32"), weights_of(facts).by_tensor
    within = "" if facts.vision is None else f"{VISION_FAMILIES[facts.vision.kind].language}."
    tensors: dict[str, dict[str, None]] = {}
    for piece in layout.pieces:
        tensors.setdefault(piece.param, {})[piece.tensor] = None
    separate = any(
        len(matrix.tensor_shape) == MATRIX
        for some in matrices.values()
        for matrix in some[:1]
        if matrix.role in EXPERTS
    )
    sites = []
    for param, names in tensors.items():
        matrix = matrices[next(iter(names))][0]
        shape, role = layout.params[param].shape, matrix.role
        outside = matrix.layer is None or matrix.layer >= facts.layers or not param.startswith(within)
        if outside or role not in ADAPTABLE or (role not in EXPERTS and not _is_linear(param, shape)):
            continue
        assert matrix.layer is not None
        fused = _fused(param, names) if role in EXPERTS else ()
        linear = role not in (*EXPERTS, Role.ROUTER) or separate
        of_megatron = _of_megatron(facts, role, matrix.layer)
        transposed = matrix.axes[-2:] != tuple(sorted(matrix.axes[-2:]))
        sites.append(Place(param, role, matrix.layer, shape, tuple(names), fused, of_megatron, transposed, linear))
    return tuple(sites)


def saved_whole(facts: ModelFacts, lora: LoraConfig) -> dict[str, str]:
    """Return the parameters of `training.lora.modules_to_save` with their published tensors; a tied head is the
    embedding. Raises ConfigError for other modules, which plain ends of names may also mean (PEFT's rule)."""
    if not lora.rank or not lora.modules_to_save:
        return {}
    matrices = weights_of(facts).by_tensor
    pieces = {piece.param.removesuffix(".weight"): piece for piece in module_layout(facts, "float32").pieces}
    roles = {module: matrices[piece.tensor][0].role for module, piece in pieces.items()}
    tables = {module for module, role in roles.items() if role in (Role.EMBEDDING, Role.HEAD)}
    trained: dict[str, str] = {}
    for entry in lora.modules_to_save:
        named = {module for module in pieces if module.endswith(entry)}
        if facts.tied_embeddings and HEAD_NAME.endswith(entry):
            named |= tables
        if facts.vision is not None or not named or not named <= tables:
            other = min(named - tables, default="no module")
            raise ConfigError(
                f"training.lora.modules_to_save: {entry} names {other}, and rlctl trains the embedding and the output "
                "layer of text models whole.",
                f"Name some of {', '.join(sorted(tables))}.",
            )
        trained |= {pieces[module].param: pieces[module].tensor for module in named}
    return trained


def dropout_problem(facts: ModelFacts, lora: LoraConfig) -> str:
    """Return why adapters cannot have `training.lora.dropout`; empty: they can, or have none."""
    for site in sites(facts, lora).all if lora.rank and lora.dropout else ():
        if site.place.is_expert or site.place.role is Role.ROUTER:
            kind = "stacks routed experts" if site.place.is_expert else "is a router"
            return f"{site.module} {kind}, whose adapters have no dropout, as in PEFT"
    return ""


def frozen_router_problem(freezes: bool, places: Iterable[Place]) -> str:
    """Return why `training.freeze_router` (`freezes`) does not go with adapters on `places`; empty: it does."""
    router = next((place for place in places if freezes and place.role is Role.ROUTER), None)
    return f"training.lora.targets has an adapter on the router {router.module}" if router else ""


def by_pattern(patterns: Mapping[str, Any], names: Iterable[str], usual: Any) -> Any:
    """Return the value of the first pattern that matches the end of a name from a dot on, as PEFT does."""
    names = tuple(names)
    return next(
        (value for key, value in patterns.items() if any(re.match(rf"(.*\.)?({key})$", name) for name in names)), usual
    )


def _is_linear(param: str, shape: Shape) -> bool:
    return param.endswith(".weight") and len(shape) == MATRIX


def _fused(param: str, tensors: Iterable[str]) -> tuple[str, ...]:
    """Return an expert's modules of transformers 4 by its published matrices (`...experts.3.gate_proj.weight`), under
    the stack."""
    parent = param.rpartition(".")[0]
    leaves = dict.fromkeys(tensor.removesuffix(".weight").rpartition(".")[2] for tensor in tensors)
    return tuple(f"{parent}.{leaf}" for leaf in leaves)


def _of_megatron(facts: ModelFacts, role: Role, layer: int) -> str:
    if facts.listed or role is Role.OTHER or role in EXPERTS:
        return ""
    name = slot(role, "local", "sequential", mla=facts.mla is not None, moe_layer=facts.is_moe_layer(layer)).name
    return f"decoder.layers.{layer}.{name.removesuffix('.weight')}"


def _matches(wanted: str | Iterable[str], name: str) -> bool:
    """PEFT's rule: a string is a regular expression of the whole name; a list has whole names and ends of names. An
    entry with `*` is a shell pattern."""
    if isinstance(wanted, str):
        return re.fullmatch(wanted, name) is not None
    return any(
        name == entry or name.endswith(f".{entry}") or ("*" in entry and fnmatchcase(name, entry)) for entry in wanted
    )


def _words(targets: str | tuple[str, ...]) -> set[str]:
    entries = (targets,) if isinstance(targets, str) else targets
    return {entry.lower() for entry in entries if entry.lower() in (*GROUPS, ALL_LINEAR)}


def _is_target(place: Place, targets: str | tuple[str, ...]) -> bool:
    words = _words(targets)
    if (ALL_LINEAR in words and place.linear) or any(_in_group(place, word) for word in words):
        return True
    if words and isinstance(targets, str):
        return False
    place.require_whole(targets)
    return place.is_matched(targets)


def _in_group(place: Place, word: str) -> bool:
    """Single outputs are gates of shared experts."""
    if place.role is not Role.OTHER:
        return place.role in GROUPS.get(word, ())
    below = place.module.split(f".{place.layer}.", 1)[-1].split(".")
    return place.shape[0] > 1 and word == ("mlp" if any(map(MLP_NAME.search, below)) else "attention")


def _names_it(targets: str | tuple[str, ...], place: Place) -> bool:
    """Whether targets name a fused matrix itself, and not its parts."""
    return not _words(targets) and any(_matches(targets, name) for name in place.names)


def _require_names(everywhere: tuple[Place, ...], key: str, wanted: str | tuple[str, ...]) -> None:
    words = _words(wanted) if key == "targets" else set()
    entries: tuple[str | tuple[str, ...], ...] = (wanted,) if isinstance(wanted, str) else tuple((e,) for e in wanted)
    for entry in entries:
        text = entry if isinstance(entry, str) else entry[0]
        if text.lower() in words:
            continue
        names = (name for place in everywhere for name in (*place.names, *place.fused))
        if not any(_matches(entry, name) for name in names):
            raise ConfigError(
                f"training.lora.{key}: {text} names no linear layer of the model's layers.",
                f"Name some of {_examples(everywhere)}.",
            )


def _examples(some: Iterable[Place]) -> str:
    return ", ".join(list(dict.fromkeys(place.module.rpartition(".")[2] for place in some))[:12])
