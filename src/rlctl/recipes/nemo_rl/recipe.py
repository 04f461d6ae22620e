"""NeMo-RL recipes as rlctl configuration. OmegaConf merges the `defaults` chain and resolves references, Hydra parses
overrides, and every key is mapped or reported with the reason."""

from __future__ import annotations

import difflib
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rlctl.config.files import read_text
from rlctl.config.other_trainers import KEYS as OTHER_TRAINERS
from rlctl.config.passthrough import TARGETS
from rlctl.config.recipes import Entry, Import, Status
from rlctl.config.schema import Schema
from rlctl.config.yaml_values import FILE_LIMIT_BYTES, explain
from rlctl.errors import ConfigError
from rlctl.recipes.hydra import Override, sentence
from rlctl.recipes.nemo_rl.images import MODEL, on_dtensor
from rlctl.recipes.nemo_rl.mapping_rules import (
    FOREIGN,
    FURTHER,
    HANDED_ON,
    LOGGERS,
    OF_THE_ALGORITHM,
    ONE_TEACHER,
    carry_over,
    critic_values,
    disagreement,
    foreign_kind,
    in_epochs,
    is_field,
    left_out,
    not_read,
    of_images,
    of_other_backend,
)
from rlctl.recipes.nemo_rl.mapping_table import RENAMED, RULES, finish
from rlctl.recipes.rules import Leaf, Rule, apply_rule, rule_of
from rlctl.settings.config import RolloutConfig

if TYPE_CHECKING:
    from omegaconf import DictConfig, ListConfig

TRAINER = "NeMo-RL"
ONLY_LOGS = ("logger.", "checkpointing.", "data.validation.", "env.nemo_gym.")
"""Sections with dangling references that a run can ignore."""


SECTIONS = {".".join(key.split(".")[:count]) for key in RULES for count in range(1, key.count(".") + 1)}
ONE_VALUE = RULES.keys() - SECTIONS
"""Keys with one value in NeMo-RL, without subkeys."""


PPO = {"ppo.async_ppo": "grpo.async_grpo", "ppo": "grpo"}
"""Sections of PPO with GRPO's keys and rules."""

ALIKE = {"teacher": "policy", "value": "policy", "generation": "policy.generation", "tokenizer": "policy.tokenizer"}
"""Sections that have the keys of another one."""

OPEN = frozenset((
    "automodel_kwargs", "chat_template_kwargs", "default_chat_template_kwargs", "dynamo_cfg", "env_vars",
    "hf_config_overrides", "mcore_generation_config", "megatron_cfg_overrides", "nemo_gym", "refit_cfg", "sglang_cfg",
    "sglang_kwargs", "teacher_model_by_agent_name", "teacher_overrides", "trtllm_cfg", "trtllm_kwargs", "video",
))  # fmt: skip
"""Sections that hold any names: variables, arguments of other libraries, and what belongs to engines without rules."""

LEARNS = re.compile(r"policy\.(megatron_cfg\.)?(optimizer|scheduler|max_grad_norm)\b")
"""Keys of optimizer and schedule in either block."""

SCHEDULER = re.compile(r"policy\.scheduler\.(\d+\.)?")
IN_SCHEDULER = ("name", "milestones", "kwargs", *(f"kwargs.{name}" for name in (
    "start_factor", "end_factor", "factor", "total_iters", "T_max", "eta_min", "last_epoch", "gamma", "step_size",
    "milestones", "T_0", "T_mult", "power",
)))  # fmt: skip
"""Keys of torch's schedulers; a recipe has one or a list."""

BOOLEAN_TEXTS = ("true", "false", "yes", "no", "on", "off")


@dataclass(frozen=True)
class Unresolved:
    """A value with a dangling reference."""

    text: Any
    why: str

    def __str__(self) -> str:
        return str(self.text)


@functools.cache
def other_keys() -> frozenset[str]:
    """Return NeMo-RL's keys with only a section rule in the table."""
    text = (Path(__file__).parent / "other_keys.txt").read_text()
    sections = (line.split() for line in text.replace("\n  ", " ").splitlines())
    return frozenset(f"{section}{name}" for section, *names in sections for name in names)


def names_around(key: str) -> set[str]:
    """Return candidate names for `key`: NeMo-RL's, and fields passed to Megatron-Core and vLLM in its section."""
    names = {*other_keys(), *(rule.removesuffix(".*") for rule in RULES)}
    if scheduler := SCHEDULER.match(key):
        names |= {scheduler[0] + name for name in IN_SCHEDULER}
    for section, target in HANDED_ON.items():
        if key.startswith(f"{section}."):
            names |= {f"{section}.{field}" for field in TARGETS[target].fields() or ()}
    for section, like in ALIKE.items():
        if key.startswith(f"{section}."):
            alike = names_around(like + key.removeprefix(section))
            names |= {section + name.removeprefix(like) for name in alike if name.startswith(f"{like}.")}
    return names


def knows(key: str) -> bool:
    """Return whether NeMo-RL has a key or section of this name, or passes it to Megatron or vLLM, which has it."""
    key = renamed(key)
    names = names_around(key)
    section = any(name.startswith(f"{key}.") for name in names)
    return key in names or section or not OPEN.isdisjoint(key.split(".")[:-1]) or is_field(key)


def closest(key: str, cutoff: float, present: Sequence[str] = ()) -> str | None:
    """Return the most similar name among NeMo-RL's and `present`, in the same section if one part is unknown."""
    names = sorted({*names_around(key), *present})
    parts = key.split(".")
    for count, part in enumerate(parts):
        section = "".join(f"{each}." for each in parts[:count])
        inside = {name.removeprefix(section).partition(".")[0] for name in names if name.startswith(section)}
        if part in inside:
            continue
        alike = difflib.get_close_matches(part, sorted(inside), 1, 0.75)
        meant = [".".join((f"{section}{name}", *parts[count + 1 :])) for name in alike]
        meant += [name for name in names if section and name.startswith(section) and name.endswith(f".{part}")]
        if meant and (meant[0] in names or knows(meant[0])):
            return meant[0]
        break
    return next(iter(difflib.get_close_matches(key, names, 1, cutoff)), None)


def import_recipe(path: Path | None, overrides: Sequence[Override] = ()) -> Import:
    """Read and map a recipe with overrides, or overrides alone. Raises ConfigError for an unreadable file or an unknown
    override; unknown keys of the file are entries of the result."""
    result = Import(path or Path("recipe.yaml"), trainer=TRAINER)
    before = read_recipe(path) if overrides else {}
    result.before = {renamed(key): value for key, value in leaves_of(before)}
    with_teacher = _with_teachers(dict(leaves_of(read_recipe(path, overrides, result.files))))
    overridden = {key for override in overrides for key in given_keys(override)}
    result.overridden = frozenset(map(renamed, overridden))
    for key in with_teacher:
        if (now := renamed(key)) != key and not key.startswith("ppo."):
            result.entries.append(Entry(key, with_teacher[key], "mapped", f"read as {now}"))
    leaves = {renamed(key): value for key, value in with_teacher.items()}
    constants = {key: value for key, value in leaves.items() if not isinstance(value, Unresolved)}
    result.foreign, algorithm = foreign_kind(constants)
    if algorithm == "distill":
        if not any(FURTHER.match(key) and not key.startswith(f"{ONE_TEACHER}.") for key in leaves):
            result.set("teacher.own_tokenizer", True, f"{ONE_TEACHER}.tokenizer")
        leaves, constants = (
            {_of_teacher(key): value for key, value in mapping.items()} for mapping in (leaves, constants)
        )
    if result.foreign is None and of_images(constants):
        result.set("model.images", True, MODEL)
    if is_ppo := algorithm == "grpo" and any(key.startswith("ppo.") for key in with_teacher):
        algorithm = "ppo"
    if algorithm is not None and result.foreign is None:
        result.set("run.algorithm", algorithm, algorithm)
    unwritten = left_out(algorithm, constants) if result.foreign is None else {}
    constants |= unwritten
    other = Import(result.path)
    for key, value in (leaves | unwritten).items():
        rule = find_rule(key)
        if outcome := _outcome(key, value, rule, constants, result.foreign):
            text = value.text if isinstance(value, Unresolved) else value
            result.entries.append(Entry(key, text, *outcome))
        elif rule is not None:
            apply_rule(rule, Leaf(other if of_other_backend(key, constants) else result, key, value, constants))
    carry_over(result, other, constants)
    finish(result, constants)
    on_dtensor(result, constants)
    result.entries = [entry for entry in result.entries if entry.key not in unwritten]
    if is_ppo:
        _import_critic(result, constants)
    if line := disagreement(result, other, constants):
        result.notes.append(line)
    _explain_unknown(result, overridden - set(_paths(before)))
    order = {key: index for index, key in enumerate(leaves)}
    if algorithm == "distill":
        result.entries = [replace(entry, key=_in_list(entry.key)) for entry in result.entries]
        result.source = {key: _in_list(source) for key, source in result.source.items()}
        order = {key: index for index, key in enumerate(with_teacher)}
    result.entries.sort(key=lambda entry: order.get(entry.key, len(order)))
    # Recipes of dense models carry fields of experts, and most name loggers that need not be installed here.
    result.optional = {key for key in result.values if key.startswith(("megatron.", "ddp."))}
    if not result.overridden & LOGGERS.keys():
        result.optional.add("run.loggers")
    if is_ppo:
        result.entries = [replace(entry, key=_of_ppo(entry.key)) for entry in result.entries]
        result.source = {key: _of_ppo(source) for key, source in result.source.items()}
    return result


def _explain_unknown(result: Import, typed: set[str]) -> None:
    for index, entry in enumerate(result.entries):
        if entry.status != "not known":
            continue
        if entry.key in typed:
            raise _unknown(entry.key, (), entry.note)
        if close := closest(entry.key, 0.75):
            result.entries[index] = replace(entry, note=f"{entry.note}; did you mean {close}?")


def _with_teachers(leaves: dict[str, Any]) -> dict[str, Any]:
    listed = leaves.get("teachers")
    if not isinstance(listed, list) or not listed or not all(isinstance(each, Mapping) for each in listed):
        return leaves
    teacher_keys = {
        f"teachers.{number}.{key}": value for number, each in enumerate(listed) for key, value in leaves_of(each)
    }
    kept = {key: value for key, value in leaves.items() if key != "teachers" and key.partition(".")[0] != "teacher"}
    return kept | teacher_keys


def _of_teacher(key: str) -> str:
    return f"teacher{key.removeprefix(ONE_TEACHER)}" if key.startswith(f"{ONE_TEACHER}.") else key


def _in_list(key: str) -> str:
    return f"{ONE_TEACHER}{key.removeprefix('teacher')}" if key.startswith("teacher.") else key


def _of_ppo(key: str) -> str:
    return next((old + key.removeprefix(new) for old, new in PPO.items() if key.startswith(f"{new}.")), key)


def _import_critic(result: Import, leaves: Mapping[str, Any]) -> None:
    """Read how the value model learns as if it were the policy, and give it to the critic."""
    critic, other = Import(result.path), Import(result.path)
    as_policy = {
        f"policy.{key.removeprefix('value.')}": value for key, value in leaves.items() if key.startswith("value.")
    }
    learned = {key: value for key, value in as_policy.items() if of_other_backend(key, as_policy) or LEARNS.match(key)}
    for key, value in learned.items():
        if (rule := find_rule(key)) is not None and not not_read(key, as_policy, None):
            apply_rule(rule, Leaf(other if of_other_backend(key, as_policy) else critic, key, value, as_policy))
    carry_over(critic, other, as_policy)
    for key, value in critic_values(critic).items():
        result.set(key, value, "value")
    result.entries += [
        replace(entry, key=f"value.{entry.key.removeprefix('policy.')}")
        for entry in critic.entries
        if entry.status == "not yet"
    ]
    if (epochs := result.values.get("batch.epochs", 1)) > 1:
        in_epochs(result, epochs)


def _outcome(
    key: str, value: Any, rule: Rule | None, leaves: Mapping[str, Any], foreign: str | None
) -> tuple[Status, str] | None:
    """Return the outcome of a key that no rule is for, or whose rule cannot be applied; None where it can."""
    stops: Status = "logging" if key.startswith(ONLY_LOGS) else "not yet"
    if isinstance(value, Unresolved) and (rule is not None or key in SECTIONS):
        return stops, value.why
    if key in SECTIONS - RULES.keys():
        empty = value in ({}, [], None)
        return ("not applicable", "the section is empty") if empty else (stops, "it is a section, which holds keys")
    if rule is None:
        if foreign and key.partition(".")[0] in OF_THE_ALGORITHM:
            return "not applicable", FOREIGN
        return "not known", "rlctl does not know this key"
    if key.endswith("._override_"):
        return "not applicable", "NeMo-RL reads it in top-level sections alone"
    if isinstance(value, Mapping) and value and key in ONE_VALUE:
        return stops, "it is a section, and NeMo-RL has one value there"
    any_text = ".env_vars." in key or key.startswith("logger.")  # a variable's value, a name in a logger
    if isinstance(value, str) and value.lower() in BOOLEAN_TEXTS and not any_text:
        description = "it is a text, and NeMo-RL takes every text for true: write true or false without quotes"
        return "not yet", f"{description}, or ${{oc.decode:...}} around a variable"
    reason = not_read(key, leaves, foreign)
    return ("not applicable", reason) if reason else None


def find_rule(key: str) -> Rule | None:
    """Return a key's rule, else the nearest section's (`.*`)."""
    return rule_of(key, RULES)


def renamed(key: str) -> str:
    """Return the name that a key has in NeMo-RL today."""
    for old, new in (RENAMED | PPO).items():
        if key == old or key.startswith(f"{old}."):
            return new + key.removeprefix(old)
    return key


def leaves_of(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield leaves by dotted key; an empty mapping is a leaf, and so is a section where NeMo-RL has one value."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and renamed(key) not in ONE_VALUE:
            yield from leaves_of(value, f"{key}.")
        else:
            yield key, value


def given_keys(override: Override) -> list[str]:
    """Return the keys that an override sets; keys inside a mapping separately."""
    inside = isinstance(override.value, Mapping) and override.value
    return [key for key, _ in leaves_of(override.value, f"{override.key}.")] if inside else [override.key]


def _paths(values: Any, prefix: str = "") -> Iterator[str]:
    items = enumerate(values) if isinstance(values, list) else values.items() if isinstance(values, Mapping) else ()
    for name, value in items:
        yield f"{prefix}{name}"
        yield from _paths(value, f"{prefix}{name}.")


def _unknown(key: str, present: Sequence[str], reason: str = "neither the recipe nor NeMo-RL has it") -> ConfigError:
    """Return the error of an unknown override, with another trainer's counterpart or the more similar name of NeMo-RL
    and rlctl."""
    schema = Schema((RolloutConfig,))
    ours = schema.nearest(key) if key in OTHER_TRAINERS or key.partition(".")[0] in schema.sections else None
    names = [name for name in (closest(key, 0.6, present), ours) if name]
    close = [ours] if key in OTHER_TRAINERS else difflib.get_close_matches(key, names, 1, 0) if names else []
    meant = f"Did you mean `{close[0]}`?" if close else "`rlctl config schema` lists rlctl's own keys."
    return ConfigError(f"unknown key `{key}`: {reason}.", meant)


RESOLVERS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": lambda a, b: max(a, b),
}
"""Resolvers that NeMo-RL registers, besides OmegaConf's."""


def read_recipe(
    path: Path | None, overrides: Sequence[Override] = (), files: list[Path] | None = None
) -> dict[str, Any]:
    """Merge a recipe's defaults and overrides and resolve references; dangling ones are `Unresolved`, and `files` gets
    the read files. Raises ConfigError for missing or cyclic defaults and unknown overrides."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for name, resolver in RESOLVERS.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    config = OmegaConf.create({}) if path is None else _with_defaults(path, (), [] if files is None else files)
    present = list(_paths(OmegaConf.to_container(config, resolve=False)))
    for override in overrides:
        for key in given_keys(override):
            if key not in present and not knows(key):
                reason = "rlctl has no such key, and NeMo-RL has none"
                raise _unknown(key, present, *([reason] if path is None else []))
        try:
            if not override.remove:
                OmegaConf.update(config, override.key, override.value, merge=True, force_add=True)
            elif override.key in present:
                section, _, name = override.key.rpartition(".")
                holder = OmegaConf.select(config, section) if section else config
                del holder[int(name) if OmegaConf.is_list(holder) else name]
        except (OmegaConfBaseException, ValueError, IndexError) as error:
            raise ConfigError(f"the override of `{override.key}` cannot be applied: {sentence(error)}.") from error
    return {str(key): _resolved(config, key) for key in config}


def _resolved(holder: DictConfig | ListConfig, key: Any) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    try:
        value = holder[key]
        if OmegaConf.is_dict(value) and not OmegaConf.is_interpolation(holder, key):
            return {str(name): _resolved(value, name) for name in value}
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except MissingMandatoryValue:
        return "???"
    except OmegaConfBaseException as error:
        reason = sentence(error).rpartition(" raised while resolving interpolation: ")[2].strip("\"'")
        written: Any = OmegaConf.to_container(holder, resolve=False)
        return Unresolved(written[key], reason)


def _with_defaults(path: Path, chain: tuple[Path, ...], files: list[Path]) -> DictConfig:
    """Merge a recipe over its `defaults`; a top-level section with `_override_: true` replaces the one below."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    place = path.resolve()
    files.append(place)
    if place in chain:
        raise ConfigError(f"{path}: its chain of `defaults` comes back to itself.")
    problem = f"`defaults` of {chain[-1].name}:" if chain else "NeMo-RL recipe"
    text = read_text(path, problem, FILE_LIMIT_BYTES)
    try:
        values: Any = OmegaConf.create(_parsed(text))
        if not OmegaConf.is_dict(values):
            raise ConfigError(f"{problem} {path} must hold sections of keys, not a list.")
        parents = values.pop("defaults", None) or []
        merged = OmegaConf.create({})
        for parent in [parents] if isinstance(parents, str) else parents:
            if not isinstance(parent, str):
                raise ConfigError(f"{path}: `defaults` names {parent!r}, which is not a file.")
            if not os.path.isfile(path.parent / parent):  # False for a name that is too long
                reason = f"{path} builds on {parent} (`defaults`), and there is no file {path.parent / parent}."
                raise ConfigError(
                    reason, "Keep recipes in the folders that they have in NeMo-RL, or copy this file, too."
                )
            _merge(merged, _with_defaults(path.parent / parent, (*chain, place), files))
        _merge(merged, values)
        return merged
    except yaml.YAMLError as error:
        raise ConfigError(f"{problem} {path} is not valid YAML: {explain(error)}.") from error
    except (OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(f"{problem} {path} cannot be read: {sentence(error)}.") from error


@functools.lru_cache(maxsize=32)
def _parsed(text: str) -> Any:
    """Return a file's values, which `import_recipe` reads once more with overrides."""
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.create(text), resolve=False)


def _merge(under: DictConfig, over: DictConfig) -> None:
    from omegaconf import OmegaConf

    for key in list(over):
        plain = not OmegaConf.is_missing(over, key) and not OmegaConf.is_interpolation(over, key)
        if plain and OmegaConf.is_dict(over[key]) and over[key].pop("_override_", False):
            under.pop(key, None)
    under.merge_with(over)
