"""The work of `rlctl diverge`: policy and engine as a run starts them, and transformers, over the same tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlctl.backends.base import EngineWorker
from rlctl.backends.batching.batch import TrainBatch, WeightedSequence
from rlctl.backends.clients import EngineClient, PolicyClient
from rlctl.backends.hidden_states import IN, OUT, Paths, States, joined
from rlctl.backends.messages import GroupRequest, Sampling
from rlctl.checkpoints.conversion.hf_megatron import Options, megatron_to_hf
from rlctl.checkpoints.conversion.prepared_model import prepared, require_seen
from rlctl.cluster.ray_session import put, ray_session
from rlctl.config.files import temporary_folder
from rlctl.data.rollouts import RolloutColumns
from rlctl.divergence.causes import cause_of
from rlctl.divergence.compare import examine, first_parting, logprobs
from rlctl.divergence.reference import Reference, load_reference
from rlctl.divergence.report import DivergenceReport, Program
from rlctl.errors import InputError, RlctlError, VerificationError
from rlctl.jobs.refit_test_job import RefitTestJob
from rlctl.preparation.run_workers import RunWorkers, start_run_workers
from rlctl.preparation.worker_specs import converts
from rlctl.runs.directory import Checkpoint

if TYPE_CHECKING:
    import torch

PREDICTED = 32
"""Tokens at the end of each sequence whose log-probs are compared."""
TOKENS, LEAST = 96, 8
"""Tokens of the first sequence, and the fewest; the second has two thirds."""
WIDEST_WINDOW = 1100
"""Sliding windows up to this size are exceeded by default."""


@dataclass(frozen=True)
class DivergeJob:
    """A model or a run's checkpoint, with the plan that `train` would use or the run used."""

    test: RefitTestJob
    checkpoint: Checkpoint | None
    tokens: int | None = None
    """Tokens of the first sequence; None: enough to exceed a sliding window."""

    @property
    def wanted(self) -> int:
        """Tokens of the first sequence, where the model takes them."""
        window = self.test.facts.sliding_window or 0
        return self.tokens or max(TOKENS, window + TOKENS // 2 if window <= WIDEST_WINDOW else 0)

    def sequences(self) -> list[list[int]]:
        """Return random tokens. Raises InputError for more than the model takes."""
        facts, most = self.test.facts, self.test.config.model.max_length
        limit = min(most or facts.max_length, facts.max_length) - 2
        if self.tokens is not None and not LEAST <= self.tokens <= limit:
            reason = f"--tokens {self.tokens}: the model and its plan take {LEAST} to {limit} tokens."
            raise InputError(reason, "Choose another number, or set model.max_length.")
        usual = sorted({*range(facts.text_vocab)} - {*facts.never_sampled})
        generator, first = np.random.default_rng(0), min(self.wanted, limit)
        return [generator.choice(usual, length).tolist() for length in (first, max(LEAST, first * 2 // 3))]

    def notes(self, length: int) -> list[str]:
        window, notes = self.test.facts.sliding_window or 0, list[str]()
        if window >= length:
            more = f"a sliding window of {window} tokens was not exceeded: --tokens {window + TOKENS // 2} is longer"
            notes.append(more)
        config = self.test.config
        for key, value in (
            ("training.quantization.format", config.training.quantization.format),
            ("vllm.quantization", config.vllm.passed.get("quantization", "none")),
        ):
            if value != "none":
                notes.append(f"{key} = {value} rounds weights, and transformers computes with weights that are not")
        if self.test.dtype != "float32":
            notes.append(f"--set model.dtype=float32 shows differences below the noise of {self.test.dtype}")
        return notes


def run_diverge(job: DivergeJob, tell: Callable[[str], None]) -> DivergenceReport:
    """Start policy and engine, record their hidden states, compare them with transformers, and stop them."""
    import torch

    started, test = time.monotonic(), job.test
    require_seen(test.base_model, test.plan.cluster.nodes)
    sequences, dtype = job.sequences(), getattr(torch, test.dtype)
    with temporary_folder("diverge", tell) as place:
        tell("running transformers")
        published, earlier = _published(job, place)
        reference = load_reference(published, sequences, dtype, test.config.optimizer.rounding)
        if earlier is not None:
            reference.remember("the model that the run began with", load_reference(earlier, sequences, dtype))
        if converts(test.config, test.plan):
            test = replace(test, base_model=prepared(test.base_model, test.dtype, test.plan.cluster.nodes, tell))
        with ray_session(test.config.cluster.ray_address, logs=place / "logs", tell=tell):
            tell("starting the policy and the engine")
            with start_run_workers(test.workers(), place / "logs") as workers:
                _load(replace(job, test=test), workers)
                tell("recording hidden states")
                trainer = joined(_policy_states(workers.policy, reference, sequences), [*map(len, sequences)])
                engine, equal = _engine_states(replace(job, test=test), workers, reference, sequences)
    tell("comparing")
    never, names = test.facts.never_sampled, _names(test, workers, equal)
    programs = [_program("trainer", names[0], reference, trainer, dtype, never)]
    if isinstance(engine, RlctlError):
        programs.append(Program("engine", names[1], (), (), problem=engine.message))
    elif engine is not None:
        states = joined(engine, [*map(len, sequences)])
        programs.append(_program("engine", names[1], reference, states, dtype, never))
    label = test.base_model.label if job.checkpoint is None else f"step {job.checkpoint.step} of {_run_of(job)}"
    lengths = (len(sequences[0]), len(sequences[1]))
    notes = tuple(job.notes(lengths[0]))
    return DivergenceReport(label, test.dtype, lengths, tuple(programs), notes, time.monotonic() - started)


def _run_of(job: DivergeJob) -> str:
    assert job.checkpoint is not None  # only with one
    return job.checkpoint.path.parents[1].name


def _published(job: DivergeJob, place: Path) -> tuple[Path, Path | None]:
    """Return the published form of the weights, and of those that a run began with."""
    model, checkpoint = job.test.base_model, job.checkpoint
    options = Options(dtype=job.test.dtype, verify=False)
    before = model.directory
    if model.megatron is not None:
        before = place / "model"
        megatron_to_hf(model.megatron, before, model, options)
    if checkpoint is None:
        return before, None
    megatron_to_hf(checkpoint.policy, place / "checkpoint", replace(model, directory=before, megatron=None), options)
    return place / "checkpoint", before


def _names(test: RefitTestJob, workers: RunWorkers, equal: int) -> tuple[str, str]:
    spec = workers.spec
    trainer = f"{test.plan.backend}, {spec.policy.parallel.name()}"
    if spec.engines is None:
        return trainer, ""
    weights = f", {equal} tensors equal to the trainer's" if equal else ""
    return trainer, f"{spec.engines.backend.name}, TP{spec.engines.ranks}{weights}"


def _load(job: DivergeJob, workers: RunWorkers) -> None:
    saved, adapters = job.checkpoint, job.test.config.training.lora.rank > 0
    if saved is None or adapters:  # a checkpoint of adapters contains no base weights
        workers.policy.load_model(job.test.base_model.weights)
    if saved is not None:
        workers.policy.load_saved(saved.policy)


def _policy_states(policy: PolicyClient, reference: Reference, sequences: Sequence[Sequence[int]]) -> list[States]:
    """Replaces the policy's loaded batch."""
    rows, columns = list[WeightedSequence](), dict[int, object]()
    for number, sequence in enumerate(sequences):
        chosen = min(PREDICTED, len(sequence) - 1)
        rows.append(WeightedSequence(number, 0, len(sequence) - chosen, len(sequence), 0.0, 1.0))
        tokens, count = np.array(sequence, np.int32), len(sequence)
        mask = np.arange(count) >= count - chosen
        offsets, logprobs_T = np.array([0, count], np.int32), np.zeros(count, np.float32)
        columns[number] = put(RolloutColumns(tokens, offsets, mask, logprobs_T, np.where(mask, 0, -1)))
    policy.load_batch(TrainBatch((tuple(rows),), columns))
    return policy.hidden_states(reference.paths())


def _engine_states(
    job: DivergeJob, workers: RunWorkers, reference: Reference, sequences: Sequence[Sequence[int]]
) -> tuple[list[States] | RlctlError | None, int]:
    """Refit and record the first engine. Also return how many tensors were compared and equal. An error of the
    comparison is returned; without engines None."""
    if workers.engines is None:
        return None, 0
    test = job.test
    source = test.base_model if job.checkpoint is None else None
    with workers.weight_sync(test.config.refit, source) as sync:
        try:
            equal = sync.refit(job.checkpoint.step if job.checkpoint else 0).verified
        except VerificationError as error:
            return error, 0
        with sync.generating():
            limit_s = test.config.cluster.step_limit_s
            return engine_states(sync.engines, reference.paths(), sequences, limit_s), equal


def engine_states(
    engines: EngineClient, paths: Paths, sequences: Sequence[Sequence[int]], timeout_s: float
) -> list[States]:
    """Record the first engine on each sequence alone."""
    first, states = engines.receivers.part([0]), list[States]()
    for number, sequence in enumerate(sequences):
        first.call(EngineWorker.record_states, paths)
        request = GroupRequest(number, tuple(sequence), (number,))
        shares = [[request], *([] for _ in range(len(engines) - 1))]
        outcome = engines.generate(shares, Sampling(max_new_tokens=1), timeout_s)[0]
        (of_engine,) = first.call(EngineWorker.recorded_states, number, len(sequence), PREDICTED)
        if isinstance(outcome, RlctlError):
            raise outcome
        states += of_engine
    return states


def _program(
    name: str,
    words: str,
    reference: Reference,
    states: Mapping[str, Sequence[torch.Tensor]],
    dtype: torch.dtype,
    never: Sequence[int],
) -> Program:
    examined = examine(reference, states, dtype, never)
    parting = first_parting(examined)
    cause = None if parting is None else cause_of(reference, parting, dtype, never)
    missing = [point for point in reference.points[1:] if not {point + IN, point + OUT} <= states.keys()]
    measures = tuple(point.measure for point in examined)
    return Program(name, words, measures, tuple(logprobs(reference, states, never)), cause, tuple(missing))
