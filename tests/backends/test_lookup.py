"""A backend is a record: one from outside of the package is planned, shown and refused like those of rlctl's own."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import pytest

from rlctl.backends import lookup
from rlctl.backends.base import EngineSpec, PolicySpec, WeightSource
from rlctl.backends.lookup import (
    EngineBackend,
    PolicyBackend,
    SectionArguments,
    policy_backend,
    register_backend,
    require_backends,
)
from rlctl.cluster.worker_host import imported
from rlctl.errors import ConfigError
from rlctl.jobs.backend_arguments import BackendArguments
from rlctl.methods.available import method_from_config
from rlctl.methods.configuration import resolve
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.models.facts import ModelFacts
from rlctl.planner.make_plan import refuse_unrunnable
from rlctl.preparation.worker_specs import planned_workers
from rlctl.refit.weight_sender import policy_process
from rlctl.weights import hf
from rlctl.weights.transfer_plan import SingleWorld
from support.engines import tiny_facts
from support.plans import plan_of


class ToyWorker(WeightSource):
    """A policy rank that holds nothing."""

    def __init__(self, rank: int, world_size: int, master_addr: str, spec: PolicySpec) -> None:
        self.rank, self.spec, self.closed = rank, spec, False

    def layouts(self) -> SingleWorld:
        return layouts(self.spec)

    def parameters(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.closed = True


def layouts(spec: PolicySpec) -> SingleWorld:
    return SingleWorld(hf.layout(spec.facts, spec.dtype))


def refuse(spec: PolicySpec) -> None:
    if spec.parallel.tp > 1:
        raise ConfigError("the toy does not know tensor parallelism.")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> PolicyBackend:
    monkeypatch.setattr(lookup, "POLICIES", dict(lookup.POLICIES))
    record = PolicyBackend(
        "toy",
        f"{__name__}:ToyWorker",
        layouts,
        lambda spec: [SectionArguments("optimizer", "OptimizerConfig", {"lr": spec.optimizer.lr}, {})],
        refuse,
    )
    register_backend(record)
    return record


def planned(*sets: str, backend: str = "toy") -> Any:
    """The workers of a run of the tiny Llama with the toy for a policy."""
    config = resolve(preset="laptop", sets=[f"training.backend={backend}", *sets], environment={}).config
    require_backends(config)
    plan = plan_of(config, tiny_facts(tied=False))
    refuse_unrunnable(plan)
    return planned_workers(config, plan.facts, plan, Path("model"), None, method_from_config(config))


def test_a_backend_without_a_value_model_is_refused_one(toy: PolicyBackend) -> None:
    critic = ("advantage.baseline=critic", "advantage.normalize_std=false")
    with pytest.raises(ConfigError, match="needs a value model, and the backend toy trains none"):
        planned(*critic)
    spec = planned(*critic, "training.backend=megatron", "critic.lr=3e-5", "optimizer.beta2=0.95").policy
    assert (spec.critic.optimizer.lr, spec.critic.optimizer.beta2, spec.critic.offload) == (3e-5, 0.95, False)
    for key in ("training.offload=true", "training.offload=false"):
        assert planned(*critic, "training.backend=megatron", key).policy.critic.offload == ("true" in key)


def test_a_backend_from_outside_is_looked_up_planned_and_shown(toy: PolicyBackend) -> None:
    assert policy_backend("toy") is toy
    workers = planned()
    assert workers.backend is toy
    shown = BackendArguments.of(workers).to_json()
    assert list(shown) == ["optimizer", "vllm"]
    assert shown["optimizer"] == {"lr": workers.policy.optimizer.lr}


def test_a_backend_from_outside_refuses_for_itself(toy: PolicyBackend) -> None:
    with pytest.raises(ConfigError, match="the toy does not know tensor parallelism"):
        planned("training.tp=2")


def test_a_fact_that_a_backend_does_not_read_is_refused() -> None:
    """A package's family may derive `ModelFacts` with a fact that no backend of rlctl knows."""

    @dataclass(frozen=True)
    class Capped(ModelFacts):
        logit_cap: float | None = None
        gates: tuple[str, ...] = field(default_factory=tuple)

    plain = tiny_facts(tied=False)
    spec = PolicySpec(Capped(**{one.name: getattr(plain, one.name) for one in fields(plain)}))
    for name in ("megatron", "dtensor"):
        policy_backend(name).require(spec)  # the default: nothing to compute
    capped = replace(spec, facts=replace(spec.facts, logit_cap=30.0))
    with pytest.raises(ConfigError, match=r"llama with logit_cap = 30\.0 is refused: the backend megatron"):
        policy_backend("megatron").require(capped)
    policy_backend("dtensor").require(capped)  # transformers reads config.json
    policy_backend("megatron").require(replace(spec, facts=replace(spec.facts, no_rope_layers=(1,))))


def test_each_fact_that_megatron_declares_stands_in_its_code() -> None:
    reads = policy_backend("megatron").reads
    assert reads is not None
    assert reads <= {one.name for one in fields(ModelFacts)}
    source = Path(lookup.__file__).parents[1]
    places = [*source.glob("backends/megatron/*.py"), *source.glob("weights/*.py"), source / "models" / "facts.py"]
    code = "\n".join(path.read_text() for path in places)
    assert [name for name in reads if not re.search(rf"(facts|self)\.{name}\b|\b{name}=0", code)] == []


def test_the_process_of_any_worker_holds_a_sender_of_its_weights(toy: PolicyBackend) -> None:
    assert imported(toy.worker) is ToyWorker
    spec = PolicySpec(tiny_facts(tied=False))
    process = policy_process(toy.worker, rank=0, world_size=1, master_addr="127.0.0.1", spec=spec)
    rank = process.rank()
    assert isinstance(rank, ToyWorker)
    assert process.sender().refit_fingerprints.__self__.source is rank
    process.close()
    assert rank.closed


def test_a_backend_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"training\.backend = deepspeed") as caught:
        policy_backend("deepspeed")
    assert "megatron" in (caught.value.hint or "")
    assert policy_backend("auto").name == "megatron"


@pytest.mark.parametrize("key", ["training.backend", "generation.backend"])
def test_a_misspelt_backend_is_told_the_nearest_name(key: str) -> None:
    names = {"training.backend": ("dtensor", "dtenser"), "generation.backend": ("vllm", "vlm")}[key]
    right, wrong = (resolve(sets=[f"{key}={name}"], environment={}).config for name in names)
    require_backends(right)
    with pytest.raises(ConfigError, match=rf"{key} = {names[1]} is not known") as caught:
        require_backends(wrong)
    assert names[0] in (caught.value.hint or "")


def test_an_engine_from_outside_is_selected_planned_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(config: RlConfig, facts: ModelFacts, device: str) -> None:
        if config.model.dtype == "float16":
            raise ConfigError("the toy does not know float16.")

    def spec(config: RlConfig, facts: ModelFacts, model_dir: Path | str, **decided: Any) -> EngineSpec:
        refused(config, facts, decided["device"])
        arguments = {"path": str(model_dir), "max_model_len": decided["max_length"]}
        return EngineSpec(decided["device"], arguments, None, {})

    def shown(spec: EngineSpec) -> list[SectionArguments]:
        return [SectionArguments("toy", "Toy", spec.arguments, {})]

    monkeypatch.setattr(lookup, "ENGINES", dict(lookup.ENGINES))
    register_backend(EngineBackend("toy", f"{__name__}:ToyEngine", spec, shown, refused))
    workers = planned("generation.backend=toy", backend="auto")
    assert workers.engines is not None
    assert workers.engines.backend.worker.endswith(":ToyEngine")
    assert BackendArguments.of(workers).to_json()["toy"]["path"] == "model"
    with pytest.raises(ConfigError, match="the toy does not know float16"):
        planned("generation.backend=toy", "model.dtype=float16", backend="auto")
