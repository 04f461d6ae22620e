"""The family file of a model, found by the `architectures` of its configuration or by the family's name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import chain
from typing import Any

from rlctl.config.plugins import EntryPointGroup, find_plugin, load_plugin, plugin_names
from rlctl.errors import InputError, RlctlError
from rlctl.models import other_families
from rlctl.models.facts import ModelFacts
from rlctl.models.hf_config import OWN_FILE, completed, refuse
from rlctl.models.matrices import ModelWeights
from rlctl.models.transformers_classes import why_not_built

FAMILIES = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "deepseek_v3", "gemma3", "gpt_oss", "smollm3",
    "seed_oss", "granite", "phi3", "glm4", "glm4_moe", "olmo2", "olmo3", "olmoe", "minimax_m2", "ernie4_5",
    "glm4_moe_lite",
)  # fmt: skip
"""Files of this folder with `PARTS`. An installed package adds families in the entry-point group `rlctl.families`."""
GROUP: EntryPointGroup = "rlctl.families"
PARTS = ("ARCHITECTURES", "DEFAULTS", "TINY", "FULL", "facts", "weights")
"""Names that a family file defines (`Family` has their meaning); `tiny_like`, `UNMAPPED` and `covers` are optional."""


@dataclass(frozen=True)
class Family:
    """One family file: how it reads a configuration, and its weight map."""

    name: str
    architectures: tuple[str, ...]
    defaults: dict[str, Any]
    """Defaults for missing config.json keys, from transformers' class."""
    facts: Callable[[dict[str, Any]], ModelFacts]
    weights: Callable[[ModelFacts], ModelWeights]
    tiny: dict[str, Any]
    """Keys of a tiny model's config.json beyond a tiny Llama's (`tiny_models/text.py`), for rehearsals and tests."""
    full: dict[str, Any]
    """Values that differ from `defaults`, as far as the file takes others, for tests."""
    tiny_like: Callable[[ModelFacts], dict[str, Any]]
    """Keys of a tiny model's config.json that follow the model in whose place it stands."""
    unmapped: tuple[str, ...] = ()
    """Keys for weights or computations that are not in the file, such as biases. A model that sets one counts as one
    without a file."""
    covers: Callable[[dict[str, Any]], bool] = lambda config: True
    """Whether the file is for a model of one of its architectures, beyond `unmapped`."""

    def takes(self, config: dict[str, Any]) -> bool:
        """Return whether the file is for a model of one of its architectures."""
        return not any(config.get(key) for key in self.unmapped) and self.covers(config)

    @classmethod
    def of(cls, name: str, file: Any) -> Family:
        """Return the family of a file. Raises InputError for a file without one of `PARTS`."""
        if missing := [part for part in PARTS if not hasattr(file, part)]:
            raise InputError(
                f"The file of the model family {name!r} has no `{missing[0]}`.", "docs/adding_a_model.md has its form."
            )
        like = getattr(file, "tiny_like", lambda facts: {})
        optional = {"unmapped": getattr(file, "UNMAPPED", ()), "covers": getattr(file, "covers", cls.covers)}
        values = (file.ARCHITECTURES, file.DEFAULTS, file.facts, file.weights, file.TINY, file.FULL, like)
        return cls(name, *values, **optional)


@cache
def families() -> tuple[Family, ...]:
    """Return rlctl's own families."""
    return tuple(Family.of(name, import_module(f"rlctl.models.{name}")) for name in FAMILIES)


@cache
def family(name: str) -> Family:
    """Return the family `name`. Raises InputError without such a file."""
    match = next((f for f in families() if f.name == name), None)
    if match is not None:
        return match
    if (entry := find_plugin(GROUP, name)) is None:
        names = (*FAMILIES, *plugin_names(GROUP))
        raise InputError(f"No model family `{name}`.", f"Known: {', '.join(names)}.")
    return Family.of(name, load_plugin(entry))


@cache
def has_file(name: str) -> bool:
    """Return whether a family has a file, here or in an installed package."""
    return name in FAMILIES or find_plugin(GROUP, name) is not None


def family_of(architectures: Collection[str]) -> Family | None:
    """Return the family that reads one of these architectures. Installed packages are imported only if rlctl has
    none."""
    packages = (family(name) for name in plugin_names(GROUP))
    return next((f for f in chain(families(), packages) if not set(f.architectures).isdisjoint(architectures)), None)


def family_of_config(config: dict[str, Any]) -> Family:
    """The family of a Hugging Face configuration; InputError names the nearest known architecture."""
    architectures = config.get("architectures") or []
    if (match := family_of(architectures)) is not None:
        return match
    if not architectures and not config.get("model_type"):
        raise InputError("config.json names no `architectures`.", "Take the model's own config.json.")
    name = architectures[0] if architectures else str(config.get("model_type"))
    if config.get("is_encoder_decoder"):
        raise InputError(f"`{name}` is an encoder-decoder model; rlctl trains decoder-only models.", "Name another.")
    if sees(config):
        raise InputError(
            f"`{name}` is a model that takes images, sound or video as well as text; rlctl trains only its text part.",
            "`rlctl convert text-part` takes it out; `train` and the other commands do so themselves.",
        )
    if writes_nothing(config):
        raise InputError(
            f"`{name}` has no output layer that writes text: it is a classifier, a model of rewards or one of "
            "embeddings, and rlctl trains models that write.",
            "Name the model with a causal language modelling head (...ForCausalLM) that it was made from.",
        )
    names = [a for f in families() for a in f.architectures]
    near = difflib.get_close_matches(name, names, 1, 0.0)
    hint = f"Nearest known: {near[0]}. docs/adding_a_model.md adds a family in one file."
    missing = why_not_built(name)
    because = f": rlctl has no file of its family, and {missing}" if missing else ""
    raise InputError(f"Unknown architecture `{name}`{because}.", hint)


OTHER_SENSES = ("vision_config", "audio_config", "vision_tower", "visual", "mm_vision_tower", "thinker_config")
"""Keys of a configuration that describe how a model takes in something else than text."""


def _architectures(config: dict[str, Any]) -> list[str]:
    """Return the classes that a configuration names; none where it holds no list of names."""
    names = config.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def sees(config: dict[str, Any]) -> bool:
    named = _architectures(config)
    return any(config.get(key) for key in OTHER_SENSES) or any(
        name.endswith(("ForConditionalGeneration", "ForVision2Seq", "ForImageTextToText")) for name in named
    )


OTHER_HEADS = re.compile(
    r"For(Sequence|Token|Multi\w*|Audio|Image)Classification$|For(QuestionAnswering|MaskedLM|MultipleChoice|PreTraining)$"
    r"|For(\w*)Reward(Model)?$|(?<!LMHead)Model$|Encoder$"
)
"""Architectures that output a class, score, masked token or hidden states."""


def writes_nothing(config: dict[str, Any]) -> bool:
    """Return whether a configuration has no language-model head. Remote code may have one under a body's name."""
    remote_code = config.get("auto_map")
    named = _architectures(config)
    return any(map(OTHER_HEADS.search, named)) and not (
        isinstance(remote_code, dict) and "AutoModelForCausalLM" in remote_code
    )


def other_architecture(config: dict[str, Any]) -> str | None:
    """Return the architecture of a text model that no family file here maps; None: one does, or it is no such model."""
    named = _architectures(config)
    if len(named) != 1 or config.get("is_encoder_decoder") or sees(config) or writes_nothing(config):
        return None
    model_family = family_of(named)
    return None if model_family is not None and model_family.takes(config) else named[0]


def facts_from_hf_config(config: dict[str, Any]) -> ModelFacts:
    """Return the facts of a Hugging Face `config.json`, with defaults for missing keys."""
    try:
        model_family = family_of_config(config)
        for key in model_family.unmapped:
            reason = f"the file of the family {model_family.name} does not map it."
            refuse(bool(config.get(key)), f"{key}: {config.get(key)}", reason)
        return model_family.facts(completed(config, model_family.defaults))
    except RlctlError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise InputError(f"config.json holds a value of the wrong kind: {error}.", OWN_FILE) from error


@cache
def weights_of(facts: ModelFacts) -> ModelWeights:
    """Return a model's weight map, cached, because large models have 46,000 matrices."""
    return other_families.weights(facts) if facts.listed else family(facts.family).weights(facts)
