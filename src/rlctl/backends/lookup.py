"""Backends by name. A record names the worker class and the facts that the driver needs before a process runs. Records
are imported on demand. `register_backend` and entry points of installed packages add backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from rlctl.backends.base import Device, EngineSpec, PolicySpec
from rlctl.config.plugins import find_plugin, load_plugin, origin, plugin_names
from rlctl.errors import ConfigError, suggest
from rlctl.models.constraints import family_problem
from rlctl.models.facts import ModelFacts
from rlctl.settings.config import EngineConfig, RlctlConfig
from rlctl.weights.transfer_plan import World

POLICY, ENGINE = "megatron", "vllm"
"""The backends of a configuration that names none."""


@dataclass(frozen=True)
class SectionArguments:
    """The arguments of one class of a backend; a section of the configuration passes further values through to it."""

    section: str
    class_name: str
    ours: dict[str, Any]
    passed: dict[str, Any]


@dataclass(frozen=True)
class PolicyBackend:
    """A backend that trains policies: Megatron-Core, or FSDP2 around transformers' modules."""

    name: str
    """The value of `training.backend` that selects it."""
    worker: str
    """Its `PolicyWorker`, as `module:Class`; built from `rank`, `world_size`, `master_addr` and `spec`."""
    layouts: Callable[[PolicySpec], World]
    """The layouts of all ranks of a policy."""
    arguments: Callable[[PolicySpec], Sequence[SectionArguments]]
    """Arguments of its classes, for dry runs."""
    refuse: Callable[[PolicySpec], None]
    """Raise ConfigError for combinations that it does not support."""
    reads: frozenset[str] | None = None
    """Facts of a model (fields of `ModelFacts`) that it computes with; None: it computes like transformers, from the
    model's config.json. A model with another fact is refused."""
    has_critic: bool = False
    """Whether its worker is a `CriticWorker` too, which can train a value model next to the policy."""
    takes_conversion: bool = False
    """Whether runs start from a Megatron checkpoint that the model was converted into (`model.convert`)."""

    def require(self, spec: PolicySpec) -> None:
        """Raise ConfigError for a combination that it does not support, or a fact of the model that it does not
        read."""
        if problem := family_problem(spec.facts, self.name):
            raise ConfigError(f"{problem}.", "Change model.name or training.backend.")
        for field in fields(spec.facts) if self.reads is not None else ():
            value, usual = getattr(spec.facts, field.name), field.default
            usual = field.default_factory() if field.default_factory is not MISSING else usual
            if field.name not in (self.reads or ()) and value != usual:
                shown = f" = {value!r}" if isinstance(value, str | int | float) else ""
                raise ConfigError(
                    f"model.name: a {spec.facts.family} with {field.name}{shown} is refused: the backend "
                    f"{self.name} computes without regard to {field.name}.",
                    "Train it with --backend dtensor, which computes as transformers does.",
                )
        self.refuse(spec)


class MakeEngineSpec(Protocol):
    """From configuration and plan to an engine specification. Raises ConfigError for unsupported settings."""

    def __call__(
        self,
        config: EngineConfig,
        facts: ModelFacts,
        model_dir: Path | str,
        *,
        device: Device,
        max_length: int | None = None,
        tp: int | None = None,
        threads: int | None = None,
        colocated: bool = True,
        dummy_weights: bool = False,
    ) -> EngineSpec: ...


@dataclass(frozen=True)
class EngineBackend:
    """A generation engine."""

    name: str
    """The value of `generation.backend` that selects it."""
    worker: str
    """Its `EngineWorker`, as `module:Class`; built from `spec` and `index`."""
    spec: MakeEngineSpec
    arguments: Callable[[EngineSpec], Sequence[SectionArguments]]
    """Arguments of its classes, for dry runs."""
    refuse: Callable[[EngineConfig, ModelFacts, Device], None]
    """Raise ConfigError for a combination that the engine cannot run; `spec` does too."""
    without_graphs: str = ""
    """The flag for decoding without graphs, which take memory and could keep earlier weights; empty: none."""
    exact_top_k: Callable[[Device], bool] = lambda device: False
    """Whether its top-k drops tokens beyond k that are as likely as the k-th; else it keeps all of these."""
    libraries: tuple[str, ...] = ()
    """Modules that its worker imports when it starts, and that take seconds."""


POLICIES: dict[str, PolicyBackend | str] = {
    "megatron": "rlctl.backends.megatron.backend",
    "dtensor": "rlctl.backends.dtensor.backend",
}
ENGINES: dict[str, EngineBackend | str] = {"vllm": "rlctl.backends.vllm.backend"}


def register_backend(backend: PolicyBackend | EngineBackend) -> None:
    """Add or replace a backend by name."""
    if isinstance(backend, PolicyBackend):
        POLICIES[backend.name] = backend
    else:
        ENGINES[backend.name] = backend


def policy_backend(name: str) -> PolicyBackend:
    """Return the backend `name`, or the default for `auto`. Raises ConfigError for an unknown name."""
    return _found(POLICIES, POLICY if name == "auto" else name, "training.backend")


def require_backends(config: RlctlConfig) -> None:
    """Raise ConfigError for an unknown `training.backend` or `generation.backend`. Imports and registers installed
    backends."""
    _require(POLICIES, PolicyBackend, "training.backend", config.training.backend)
    if engines := config.engine_settings:
        _require(ENGINES, EngineBackend, "generation.backend", engines.generation.backend)


def _require(backends: dict[str, Any], kind: type[PolicyBackend | EngineBackend], key: str, name: str) -> None:
    if name in ("auto", *backends):
        return
    if entry := find_plugin("rlctl.backends", name):
        record = load_plugin(entry)
        if not (isinstance(record, kind) and record.name == name):
            raise ConfigError(
                f"{key} = {name}: {entry.value} of {origin(entry)} is not a {kind.__name__} of that name.",
                "Update or uninstall that package.",
            )
        register_backend(record)
        return
    names = ("auto", *backends, *plugin_names("rlctl.backends"))
    raise ConfigError(f"{key} = {name} is not known.", suggest(name, names) or f"Choose one of {', '.join(names)}.")


def engine_backend(name: str = "auto") -> EngineBackend:
    """Return the generation engine `name`, or the default for `auto`. Raises ConfigError for an unknown name."""
    return _found(ENGINES, ENGINE if name == "auto" else name, "generation.backend")


def _found(entries: dict[str, Any], name: str, description: str) -> Any:
    if name not in entries:
        raise ConfigError(f"{description} = {name} is not known.", f"Choose one of {', '.join(sorted(entries))}.")
    entry = entries[name]
    return import_module(entry).BACKEND if isinstance(entry, str) else entry
