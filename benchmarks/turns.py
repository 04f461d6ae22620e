"""Measures rollouts of several turns: dealt turn by turn in lockstep, and as episodes that go on by themselves.

    python benchmarks/turns.py [--model DIR --episodes 24 --turns 3 --delay 1.0 --tail 10 --steps 8]

Both ways play the same episodes on one real engine, with the same seeds: up to `--turns` turns each, and a tool that
takes `--delay` seconds on average (exponentially distributed), in one call of ten `--tail` times as long (1: no tail).
In lockstep nobody begins a turn before everybody has ended the one before, as where a batch of environments is stepped
together. Prints one JSON object: seconds of each way and their ratio (above 1: episodes by themselves are faster), and
the tokens that the engine's cache of prefixes saved as a share of those that it could save, which are the whole blocks
of what an episode had read and written in the turn before.

With `--steps` it also trains on batches of as many episodes, and prints the seconds of a step that deals them in
lockstep (the rollouts above, and what else a synchronous step does) over those of a step of asynchronous rollouts.

Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rlctl.backends.clients import generate_groups
from rlctl.backends.messages import Sampling
from rlctl.backends.vllm.args import CPU_BLOCK_TOKENS
from rlctl.cluster.ray_session import fetch as fetched
from rlctl.cluster.ray_session import ray_session
from rlctl.config.files import temporary_folder
from rlctl.environments.interface import Message, Step
from rlctl.jobs.episodes_job import EpisodesJob, episodes_job
from rlctl.methods.configuration import resolve
from rlctl.preparation.laptop_model import fetch
from rlctl.preparation.run_workers import start_engines
from rlctl.rollouts.environment_episodes import EnvironmentEpisodes, EpisodePlayer
from rlctl.rollouts.episodes import Episode
from rlctl.rollouts.source import sample_seed
from rlctl.telemetry.metrics import read_metrics

STALENESS = 1
"""Number of steps that asynchronous rollouts may be ahead."""


class Slow:
    """A tool that takes its time. Delays and the number of turns follow from the seed."""

    def __init__(self, turns: int, delay: float, tail: float) -> None:
        self.turns, self.delay, self.tail = turns, delay, tail

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        self.draw, self.said = random.Random(seed), 0
        self.length = self.draw.randint(max(1, self.turns - 1), self.turns + 1)
        return "Tell me of a town, its river, its market and its people, in as few words as you can. " * 4

    async def step(self, message: Message) -> Step:
        self.said += 1
        if self.said == self.length:
            return Step(done=True)
        long = self.tail if self.draw.random() < 0.1 else 1.0
        await asyncio.sleep(self.draw.expovariate(1 / self.delay) * long)
        return Step("Go on. Say more of the same town, and of who lives there.")


class CountingPlayer(EpisodePlayer):
    """Counts what the cache of prefixes saved, and what it could have."""

    async def _turn(self, episode: Episode, *others: Any) -> Any:
        known = len(episode.tokens) - 1 if episode.answers else 0
        if episode.answers:  # what stands behind the last answer is new, and its last token was never computed
            first, answer = episode.answers[-1]
            known = first + len(answer.tokens_R) - 1
        found = await super()._turn(episode, *others)
        cached = episode.answers[-1][1].cached_tokens if known else 0
        episode.count({"could": known // CPU_BLOCK_TOKENS * CPU_BLOCK_TOKENS, "cached": cached})
        return found


class Lockstep(CountingPlayer):
    """Lets nobody begin a turn before everybody has ended the one before."""

    living = waiting = 0
    gate: asyncio.Event | None = None

    async def __call__(self, episode: Episode) -> None:
        if episode.request.row is not None:
            self.living += 1
        try:
            await super().__call__(episode)
        finally:
            if episode.request.row is not None:
                self.living -= 1
                self._open()

    async def _turn(self, *of_turn: Any) -> Any:
        await asyncio.sleep(0)  # the others count as living by then
        self.waiting += 1
        self.gate = gate = self.gate or asyncio.Event()
        self._open()
        await gate.wait()
        return await super()._turn(*of_turn)

    def _open(self) -> None:
        if self.gate is not None and self.waiting == self.living:
            self.gate.set()
            self.gate, self.waiting = None, 0


class Play(EnvironmentEpisodes):
    """A play whose player is one of those above."""

    player: type[EpisodePlayer] = CountingPlayer

    def started(self) -> EpisodePlayer:
        made = super().started()
        return type(self).player(made._play, made._host)


class LockstepPlay(Play):
    player = Lockstep


def seconds(job: EpisodesJob, kind: type[Play], logs: Path) -> tuple[float, float]:
    """Return the seconds of all episodes, and the share of what the cache could save that it saved."""
    config, prompts = job.completions.config, job.prompts
    plan = job.completions.checked_plan([200] * job.count)
    resolved = job.completions.resolved.with_values(plan.config_values())
    completions = replace(job.completions, resolved=resolved)
    spec, environment = completions.engines(plan), prompts.environment
    assert environment is not None
    play = kind(**{**vars(environment), "max_length": spec.engine.max_length})
    requests = [
        prompts.group_request(i, prompts.prompt_at(i), (sample_seed(0, i, 0),), config.run.seed)
        for i in range(job.count)
    ]
    sampling = Sampling.from_config(config.generation, stop_token_ids=prompts.encoder.stop_token_ids)
    with start_engines(replace(spec, episode=play), config.cluster, logs) as engines:
        first = replace(requests[0], group=job.count, seeds=(1, 2))
        generate_groups(engines, [first], sampling, 600.0)  # a new engine's first passes are slow
        begun = time.perf_counter()
        results = generate_groups(engines, requests, sampling, 600.0)
        taken = time.perf_counter() - begun
    counts = [one.counts for result in results for one in result.episodes]
    assert all(fetched(result.transcripts) for result in results)
    return taken, sum(one["cached"] for one in counts) / sum(one["could"] for one in counts)


def steps(model: str, asked: argparse.Namespace, *more: str) -> list[dict[str, Any]]:
    """Train on batches of the episodes; return the metrics of the steps."""
    sets = {
        "environment.params.turns": asked.turns, "environment.params.delay": asked.delay,
        "environment.params.tail": asked.tail, "environment.turns": 16, "environment.turn_timeout_s": 300,
        "batch.prompts": asked.episodes, "batch.generations": 1, "advantage.baseline": "none", "filter.skip": "false",
        "advantage.normalize_std": "false", "run.save_final": "false", "run.loggers": "[]",
        "generation.max_concurrent": asked.episodes * (1 + STALENESS),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        command = [
            str(Path(sys.executable).with_name("rlctl")), "train", "grpo", "--model", model, "--gpu", "cpu", "--nodes",
            "1", "--gpus-per-node", "0", "--env", f"{Path(__file__).resolve()}:Slow", "--max-new-tokens", "16",
            "--steps", str(asked.steps), "--run-dir", f"{place}/run", "-q", *more,
            *(part for name, value in sets.items() for part in ("--set", f"{name}={value}")),
        ]  # fmt: skip
        subprocess.run(command, check=True, stdout=sys.stderr)
        return read_metrics(Path(place) / "run" / "metrics.jsonl")


def trained(model: str, asked: argparse.Namespace, lockstep_s: float) -> dict[str, float]:
    """Return the seconds of a step in lockstep, and of one that trains while others are played, and their ratio."""
    plain = steps(model, asked)[1:]  # the first of a process is slow
    besides = fmean(one["seconds"]["total"] - one["seconds"]["generation"] for one in plain)
    kept = ("--async", "--max-staleness", str(STALENESS), "--set", "refit.in_flight=keep")
    ahead = steps(model, asked, *kept, "--set", "rollouts.order=arrival")[1 + STALENESS : -STALENESS]
    found = fmean(one["seconds"]["total"] for one in ahead)
    return {
        "lockstep_step_s": round(lockstep_s + besides, 2), "asynchronous_step_s": round(found, 2),
        "asynchronous_ratio": round((lockstep_s + besides) / found, 2),
    }  # fmt: skip


def quiet(what: str) -> None:
    """Hear what is done, and say nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--episodes", type=int, default=24)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--delay", type=float, default=1.0)
    parser.add_argument("--tail", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=0)
    asked = parser.parse_args()
    model = asked.model or fetch(quiet)
    params = {"turns": asked.turns, "delay": asked.delay, "tail": asked.tail}
    sets = [f"environment.params.{name}={value}" for name, value in params.items()]
    flags = {
        "model.name": str(model), "environment.name": f"{Path(__file__).resolve()}:Slow", "environment.turns": 16,
        "generation.max_new_tokens": 16, "cluster.gpu": "cpu", "cluster.nodes": 1, "cluster.gpus_per_node": 0,
        "environment.turn_timeout_s": 300, "generation.max_concurrent": asked.episodes,
    }  # fmt: skip
    resolved = resolve(flags=flags, sets=sets, environment={})
    job = episodes_job(resolved, None, asked.episodes, False, quiet)
    with temporary_folder("turns", quiet) as logs, ray_session(None, logs=logs, tell=quiet):
        lockstep, _ = seconds(job, LockstepPlay, logs)
        alone, saved = seconds(job, Play, logs)
    found = {
        "episodes": asked.episodes, "turns": asked.turns, "delay_s": asked.delay, "tail": asked.tail,
        "lockstep_s": round(lockstep, 2), "by_themselves_s": round(alone, 2), "ratio": round(lockstep / alone, 2),
        "prefix_cache_saved": round(saved, 3), "load": os.getloadavg()[0],
    }  # fmt: skip
    if asked.steps:
        found |= trained(str(model), asked, lockstep)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
