"""NeMo-RL recipes as rlctl configuration.

A recipe is read as NeMo-RL reads it: OmegaConf merges its chain of `defaults` and resolves its references, and Hydra
parses what the command line overrides. Then every key is mapped or reported with the reason.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rlctl.config.files import problem_with, read_text
from rlctl.config.keys import is_section, nearest
from rlctl.config.nemo_rl.mapping_rules import (
    ALGORITHMS,
    HANDED_ON,
    OF_THE_ALGORITHM,
    Entry,
    Found,
    Import,
    Rule,
    Status,
    carry_over,
    disagreement,
    foreign_kind,
    is_field,
    not_read,
    of_other_backend,
    schema_error,
)
from rlctl.config.nemo_rl.mapping_table import RENAMED, RULES, finish
from rlctl.config.other_trainers import KEYS as OTHER_TRAINERS
from rlctl.config.passthrough import TARGETS
from rlctl.config.schema import RlctlConfig
from rlctl.config.yaml_values import FILE_LIMIT_BYTES, explain
from rlctl.errors import ConfigError, InputError

if TYPE_CHECKING:
    from omegaconf import DictConfig, ListConfig

OWN = RlctlConfig.model_fields.keys()
MARKS = ("policy", "defaults", "grpo", "loss_fn", "checkpointing", "eval", *(ALGORITHMS.keys() - OWN))
"""Top-level keys that a NeMo-RL file has and an rlctl file never does (which has a section `distillation` too)."""


ONLY_LOGS = ("logger.", "checkpointing.", "data.validation.")
"""Sections that a run goes on without where they refer to what is not there."""


ONE_VALUE = RULES.keys() - {
    ".".join(parts[:count]) for key in RULES for parts in (key.split("."),) for count in range(1, len(parts))
}
"""Keys that have one value in NeMo-RL, and nothing below."""


ALIKE = {"teacher": "policy", "value": "policy", "generation": "policy.generation", "tokenizer": "policy.tokenizer"}
"""Sections that have the keys of another one."""

OPEN = frozenset((
    "automodel_kwargs", "chat_template_kwargs", "default_chat_template_kwargs", "dynamo_cfg", "env_vars",
    "hf_config_overrides", "mcore_generation_config", "nemo_gym", "on_policy_distillation", "refit_cfg", "sglang_cfg",
    "sglang_kwargs", "trtllm_cfg", "trtllm_kwargs", "video",
))  # fmt: skip
"""Sections that hold any names: variables, arguments of other libraries, and what belongs to engines without rules."""

BOOLEAN_TEXTS = ("true", "false", "yes", "no", "on", "off")


@dataclass(frozen=True)
class Override:
    """A `key=value` of the command line in Hydra's form: `+` and `++` may stand in front, and `~key` removes a key."""

    key: str
    value: Any
    remove: bool = False

    @classmethod
    def parse(cls, text: str) -> Override:
        """Raises ConfigError for what is not of the form, and for several values to try, which are no override."""
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import HydraException

        if not text.startswith("~") and "=" not in text:
            raise ConfigError(f"{text}: there is no value.", "Write key=value, for example policy.model_name=NAME.")
        try:
            parsed = OverridesParser.create().parse_override(text)
        except HydraException as error:
            hint = "Put a text with special characters in quotes within quotes: 'key=\"a, b\"'."
            raise ConfigError(f"{text} is not an override: {_first_line(error)}.", hint) from error
        if parsed.is_sweep_override():
            raise ConfigError(f"{text}: a value cannot be several values.", "Write a list in brackets: key=[1,2].")
        return cls(parsed.key_or_group, parsed.value(), parsed.is_delete())

    def leaves(self) -> list[str]:
        """Return the keys that are given a value: those inside of a mapping one by one."""
        inside = isinstance(self.value, Mapping) and self.value
        return [key for key, _ in _leaves(self.value, f"{self.key}.")] if inside else [self.key]


@dataclass(frozen=True)
class Unresolved:
    """A value that refers to what is not there."""

    text: Any
    why: str

    def __str__(self) -> str:
        return str(self.text)


def is_nemo_rl(values: Mapping[str, Any]) -> bool:
    """Return whether the top level of a YAML file is that of a NeMo-RL recipe."""
    return any(mark in values for mark in MARKS)


def knows(key: str) -> bool:
    """Return whether NeMo-RL has a key or a section of this name, or hands it on to Megatron or vLLM, which has it."""
    key = renamed(key)
    section = next((section for section in ALIKE if key.startswith(f"{section}.")), None)
    if key in RULES or key in other_keys() or is_field(key) or not OPEN.isdisjoint(key.split(".")[:-1]):
        return True
    if key.startswith("policy.scheduler."):  # a list, whose rule looks at torch's arguments
        return True
    if section is not None:
        return knows(ALIKE[section] + key.removeprefix(section))
    return any(name.startswith(f"{key}.") for name in (*RULES, *other_keys()))


@functools.cache
def other_keys() -> frozenset[str]:
    """Return the keys of NeMo-RL that the table has no rule for but that of their section."""
    text = (Path(__file__).parent / "other_keys.txt").read_text()
    sections = (line.split() for line in text.replace("\n  ", " ").splitlines())
    return frozenset(f"{section}{name}" for section, *names in sections for name in names)


def import_recipe(path: Path | None, overrides: Sequence[Override] = ()) -> Import:
    """Read and map a recipe with overrides of the command line, or these alone.

    Raises ConfigError for a file that cannot be read, and for an override of a key that neither the recipe nor rlctl
    knows. A key of the file that nobody knows is an entry of the result.
    """
    result = Import(path or Path("recipe.yaml"))
    before = read_recipe(path) if overrides else {}
    result.before = {renamed(key): value for key, value in _leaves(before)}
    found = dict(_leaves(read_recipe(path, overrides, result.files)))
    given = {key for override in overrides for key in override.leaves()}
    result.overridden = frozenset(map(renamed, given))
    for key in found:
        if (now := renamed(key)) != key:
            result.entries.append(Entry(key, found[key], "mapped", f"read as {now}, its name today"))
    leaves = {renamed(key): value for key, value in found.items()}
    known = {key: value for key, value in leaves.items() if not isinstance(value, Unresolved)}
    result.foreign, algorithm = foreign_kind(known)
    if algorithm is not None and result.foreign is None:
        result.set("run.algorithm", algorithm, algorithm)
    other = Import(result.path)
    for key, value in leaves.items():
        rule = find_rule(key, RULES)
        if rule is None:
            result.entries.append(_unknown_entry(key, value, result.foreign))
        elif (entry := _without_rule(key, value)) is not None:
            result.entries.append(entry)
        elif reason := not_read(key, known, result.foreign):
            result.entries.append(Entry(key, value, "not applicable", reason))
        else:
            _apply_rule(rule, Found(other if of_other_backend(key, known) else result, key, value, known))
    carry_over(result, other, known)
    finish(result, known)
    if line := disagreement(result, other, known):
        result.notes.append(line)
    _leave_out_invalid(result, known)
    for index, entry in enumerate(result.entries):
        if entry.status == "not known" and entry.key in given - set(_paths(before)):
            raise _unknown(entry.key, (), entry.note)
        if entry.status == "not known" and (close := _close(entry.key, 0.75)):
            result.entries[index] = replace(entry, note=f"{entry.note}; did you mean {close[0]}?")
    order = {key: index for index, key in enumerate(leaves)}
    result.entries.sort(key=lambda entry: order.get(entry.key, len(order)))
    return result


def _unknown_entry(key: str, value: Any, foreign: str | None) -> Entry:
    """Return the entry of a key that no rule is for."""
    if value in ({}, None) and any(known_key.startswith(f"{key}.") for known_key in RULES):
        return Entry(key, value, "not applicable", "the section is empty")
    if foreign and key.partition(".")[0] in OF_THE_ALGORITHM:
        return Entry(key, value, "not applicable", "it belongs to what rlctl does not run yet")
    return Entry(
        key, value.text if isinstance(value, Unresolved) else value, "not known", "rlctl does not know this key"
    )


def _without_rule(key: str, value: Any) -> Entry | None:
    """Return the entry of a value that no rule can be applied to; None where its rule can."""
    stops: Status = "logging" if key.startswith(ONLY_LOGS) else "not yet"
    if isinstance(value, Unresolved):
        return Entry(key, value.text, stops, value.why)
    if key.endswith("._override_"):
        return Entry(key, value, "not applicable", "NeMo-RL reads it in top-level sections alone")
    if isinstance(value, Mapping) and value and key in ONE_VALUE:
        return Entry(key, value, stops, "it is a section, and NeMo-RL has one value there")
    any_text = ".env_vars." in key or key.startswith("logger.")  # a variable's value, a name in a logger
    if isinstance(value, str) and value.lower() in BOOLEAN_TEXTS and not any_text:
        why = "it is a text, and NeMo-RL takes every text for true: write true or false without quotes"
        return Entry(key, value, "not yet", f"{why}, or ${{oc.decode:...}} around a variable")
    return None


def _apply_rule(rule: Rule, found: Found) -> None:
    """Map a key. Where its rule cannot work with what the recipe has, a value of another type perhaps, nothing of the
    key is kept, and an entry of the report says so."""
    result = found.result
    values, source, told = dict(result.values), dict(result.source), len(result.entries)
    try:
        rule(found)
    except InputError:  # a ValueError too, with a sentence of its own
        raise
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError):
        result.values, result.source = values, source
        del result.entries[told:]
        found.say("not yet", "rlctl cannot read such a value, or not with the values of the keys next to it")


def _leave_out_invalid(result: Import, leaves: Mapping[str, Any]) -> None:
    """Make what rlctl's own keys cannot hold entries of the report."""
    for key, value in list(result.values.items()):
        if (why := schema_error(key, value)) is None:
            continue
        source = result.source[key]
        del result.values[key], result.source[key]
        result.entries[:] = [e for e in result.entries if e.key != source or e.status not in ("mapped", "changed")]
        note = f"{key} cannot be {value!r}: {why}"
        result.entries.append(Entry(source, leaves.get(source), "not yet", note, key))


def find_rule(key: str, rules: Mapping[str, Rule]) -> Rule | None:
    """Return the rule of a key: its own, else that of the nearest section written with `.*`."""
    parts = key.split(".")
    sections = (".".join(parts[:count]) + ".*" for count in range(len(parts) - 1, 0, -1))
    return next((rules[name] for name in (key, *sections) if name in rules), None)


def renamed(key: str) -> str:
    """Return the name that a key has in NeMo-RL today."""
    for old, new in RENAMED.items():
        if key == old or key.startswith(f"{old}."):
            return new + key.removeprefix(old)
    return key


def _close(key: str, cutoff: float, names: Iterable[str] = ()) -> list[str]:
    """Return the name that is most like `key` among those of NeMo-RL, Megatron's and vLLM's fields, and `names`."""
    known = {*names, *other_keys(), *(rule for rule in RULES if not rule.endswith("*"))}
    for section, target in HANDED_ON.items():
        if key.startswith(f"{section}."):
            known.update(f"{section}.{field}" for field in TARGETS[target].fields() or ())
    return difflib.get_close_matches(key, sorted(known), 1, cutoff)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield leaves by dotted key; an empty mapping is a leaf, and so is a section where NeMo-RL has one value."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and renamed(key) not in ONE_VALUE:
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def read_recipe(
    path: Path | None, overrides: Sequence[Override] = (), files: list[Path] | None = None
) -> dict[str, Any]:
    """Return the recipe with its defaults merged, then overrides, then every reference resolved; a value whose
    reference leads nowhere is `Unresolved`. Raises ConfigError for a missing default, a chain that closes on itself,
    and an override of a key that does not exist. `files` gets the files that were read."""
    from omegaconf import OmegaConf

    for name, resolver in RESOLVERS.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    config = OmegaConf.create({}) if path is None else _with_defaults(path, (), [] if files is None else files)
    present = set(_paths(OmegaConf.to_container(config, resolve=False)))
    for override in overrides:
        for key in override.leaves():
            if key not in present and not knows(key):
                raise _unknown(key, present)
        _apply(override, config)
    return {str(key): _resolved(config, key) for key in config}


RESOLVERS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": lambda a, b: max(a, b),
}
"""Resolvers that NeMo-RL registers, next to OmegaConf's own."""


def _unknown(key: str, present: Iterable[str], why: str = "neither the recipe nor NeMo-RL has it") -> ConfigError:
    ours = key in OTHER_TRAINERS or is_section(key.partition(".")[0])
    close = [nearest(key)] if ours else _close(key, 0.6, present)
    meant = f"Did you mean `{close[0]}`?" if close else "`rlctl config schema` lists rlctl's own keys."
    return ConfigError(f"unknown key `{key}`: {why}.", meant)


def _paths(values: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of sections, values and places in lists."""
    items = enumerate(values) if isinstance(values, list) else values.items() if isinstance(values, Mapping) else ()
    for name, value in items:
        yield f"{prefix}{name}"
        yield from _paths(value, f"{prefix}{name}.")


def _apply(override: Override, config: DictConfig) -> None:
    from omegaconf import ListConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    section, _, name = override.key.rpartition(".")
    try:
        if not override.remove:
            OmegaConf.update(config, override.key, override.value, merge=True, force_add=True)
            return
        holder = OmegaConf.select(config, section) if section else config
        if isinstance(holder, ListConfig):
            del holder[int(name)]
        elif holder is not None and name in holder:
            del holder[name]
    except (OmegaConfBaseException, ValueError, IndexError) as error:
        raise ConfigError(f"the override of `{override.key}` cannot be applied: {_first_line(error)}.") from error


def _resolved(holder: DictConfig | ListConfig, key: Any) -> Any:
    """Return a value with its references resolved, and `Unresolved` instead of each leaf where that fails."""
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
        why = _first_line(error).rpartition(" raised while resolving interpolation: ")[2].strip("\"'")
        written: Any = OmegaConf.to_container(holder, resolve=False)
        return Unresolved(written[key], why)


def _first_line(error: Exception) -> str:
    """Return what a library says of an error, without the place in its own objects."""
    return str(error).partition("\n")[0].removesuffix(".")


def _with_defaults(path: Path, chain: tuple[Path, ...], files: list[Path]) -> DictConfig:
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    place = path.resolve()
    files.append(place)
    if place in chain:
        raise ConfigError(f"{path}: its chain of `defaults` comes back to itself.")
    what = f"`defaults` of {chain[-1].name}:" if chain else "NeMo-RL recipe"
    try:
        values = OmegaConf.create(read_text(path, what, FILE_LIMIT_BYTES))
    except yaml.YAMLError as error:
        raise ConfigError(f"{what} {path} is not valid YAML: {explain(error)}.") from error
    except (OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(f"{what} {path} cannot be read: {_first_line(error)}.") from error
    if not isinstance(values, DictConfig):
        raise ConfigError(f"{what} {path} must hold sections of keys, not a list.")
    parents = values.pop("defaults", None) or []
    merged = OmegaConf.create({})
    for parent in [parents] if isinstance(parents, str) else parents:
        if not isinstance(parent, str):
            raise ConfigError(f"{path}: `defaults` names {parent!r}, which is no file.")
        if problem := problem_with(path.parent / parent):
            message = f"{path} builds on {parent} (`defaults`), and {path.parent / parent} cannot be read: {problem}."
            raise ConfigError(message, "Keep recipes in the folders that they have in NeMo-RL, or copy this file, too.")
        merged = _merged(merged, _with_defaults(path.parent / parent, (*chain, place), files))
    return _merged(merged, values)


def _merged(under: DictConfig, over: DictConfig) -> DictConfig:
    """Return both merged by OmegaConf; a section of the top level with `_override_: true` replaces the one below."""
    from omegaconf import DictConfig, OmegaConf

    for key in list(over):
        if OmegaConf.is_missing(over, key) or OmegaConf.is_interpolation(over, key):
            continue
        if OmegaConf.is_dict(over[key]) and over[key].pop("_override_", False):
            under.pop(key, None)
    merged = OmegaConf.merge(under, over)
    assert isinstance(merged, DictConfig)  # as both are
    return merged
