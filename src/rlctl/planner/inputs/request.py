"""The work of a step: prompts, rollouts, their lengths, and how many optimizer steps they are trained in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from statistics import NormalDist
from typing import Any, Literal

from rlctl.models.facts import ModelFacts
from rlctl.planner.choice import PLAIN_ENGINE, EngineNumbers, LoraChoice, Precision
from rlctl.planner.inputs.cluster import ClusterFacts
from rlctl.planner.inputs.constants import DEFAULTS, Constants

Goal = Literal["fast", "safe", "cheap"]


@dataclass(frozen=True)
class Workload:
    """One training step. Lengths in tokens."""

    prompts: int = 64
    generations: int = 16
    max_length: int = 4096
    """Most tokens of prompt and completion together."""
    max_new_tokens: int | None = None
    """Most tokens of a completion; None: what `max_length` leaves."""
    mean_new_tokens: float | None = None
    """None: 40% of the most."""
    prompt_tokens: int = 150
    """Mean length of a prompt."""
    image_share: float = 0.0
    """Share of image tokens in prompts, or in texts without rollouts."""
    optimizer_steps: int = 1
    epochs: int = 1
    """Times that the optimizer steps are taken."""
    old_logprobs: bool = True
    """Log-probs of the old policy are recomputed by the trainer."""
    reference: bool = False
    """Log-probs of a reference policy are needed."""
    valued: bool = False
    """A reward model is trained, which has no logits."""
    own_teacher: bool = False
    """The policy of an earlier step is the teacher, a second model in the policy's processes."""
    teacher_average: bool = False
    """That teacher is an average of the policy's weights."""
    teacher_top: int = 0
    """Number of a teacher's most likely tokens at each position whose log-probs are compared."""
    critic: bool = False
    """A value model of the policy's size is trained next to it."""
    rollouts: bool = True
    """False: supervised training or pretraining; `prompts` sequences, nothing is generated."""
    answers: int = 0
    """Without rollouts, prompts answered at a validation; 0: no engines."""
    mean_tokens: float | None = None
    """Without rollouts, the mean length of a sequence; None: all have `max_length`, as in pretraining."""
    trains: bool = True
    """False: generation only, without a policy."""
    packing: bool = True
    dynamic: bool = False
    """Rollouts of similar length are padded to the longest; the row limit sets their number."""
    share_prompts: bool = False
    """A group's rollouts in one row share one prompt copy."""
    goal: Goal = "fast"
    staleness: int | None = None
    """Versions that rollouts may be old; None: they are made before each step, and with 0 the policy waits as then."""
    in_flight: Literal["wait", "turns", "keep", "abort"] | None = None
    """The treatment of rollouts that are being sampled when new weights come; None: the plan decides."""
    tools_s: float = 0.0
    """Seconds that the longest episodes spend in tools."""
    algorithm: str = ""
    measured: bool = False
    """Whether `prompt_tokens` is the mean of the data's own prompts."""

    @property
    def image_tokens(self) -> int:
        """Mean number of image tokens in a prompt, or in a text without rollouts."""
        read = self.prompt_tokens if self.rollouts else self.mean_tokens or self.max_length
        return round(self.image_share * read)

    @property
    def engines(self) -> bool:
        """Whether anything is sampled."""
        return self.rollouts or self.answers > 0

    @property
    def overlaps(self) -> bool:
        """Whether rollouts are made while the policy trains."""
        return bool(self.staleness)

    @property
    def keeps_rollouts(self) -> bool:
        """Whether rollouts go on under new weights, so that engines never run empty."""
        return self.overlaps and self.in_flight in ("turns", "keep")

    @property
    def lengths_differ(self) -> bool:
        """Whether sequences differ in length and are packed."""
        return self.rollouts or self.mean_tokens is not None

    @property
    def samples(self) -> int:
        return self.prompts * self.generations

    def share(self, engines: int, replicas: int = 1) -> int:
        """Rollouts of the busiest of `replicas` replicas: prompts are dealt to engines, and a prompt's rollouts stay
        together."""
        prompts, samples = (self.prompts, self.generations) if self.rollouts else (self.answers, 1)
        return -(-(-(-prompts // engines) * samples) // replicas)

    def most_at_once(self, engines: int, replicas: int = 1) -> int:
        """Most rollouts sampled at once by the busiest replica, over several steps if kept."""
        return self.share(engines, replicas) * self.steps_under_way

    @property
    def steps_under_way(self) -> int:
        """Steps whose rollouts are sampled at once: one, or up to the allowed staleness."""
        return max(1, self.staleness or 1) if self.keeps_rollouts else 1

    @property
    def new_tokens_limit(self) -> int:
        return self.max_new_tokens or max(1, self.max_length - self.prompt_tokens)

    def lengths(self, sigma: float) -> Lengths:
        mean = self.mean_new_tokens or 0.4 * self.new_tokens_limit
        return Lengths(min(mean, self.new_tokens_limit), self.new_tokens_limit, sigma, self.samples)

    def tokens(self, sigma: float) -> float:
        if not self.rollouts:
            return float(self.samples * (self.mean_tokens or self.max_length))
        return self.samples * (self.prompt_tokens + self.lengths(sigma).mean)

    def trained_tokens(self, sigma: float) -> float:
        """Tokens that go through the model in training: shared prompts counted once a group."""
        shared = self.rollouts and self.packing and self.share_prompts
        spared = self.prompts * (self.generations - 1) * self.prompt_tokens if shared else 0
        return self.tokens(sigma) - spared

    def predicted_share(self, sigma: float) -> float:
        """Share of the trained tokens after which a trained token follows; the others need no logits."""
        if not self.rollouts:
            return 1.0
        return min(1.0, self.samples * self.lengths(sigma).mean / self.trained_tokens(sigma))

    def mean_keys(self, sigma: float) -> float:
        """Mean keys that a token attends to: half of E[S^2] / E[S] over the sequences."""
        if not self.rollouts:
            return (self.mean_tokens or self.max_length) / 2
        lengths = self.lengths(sigma)
        first = self.prompt_tokens + lengths.mean
        second = self.prompt_tokens**2 + 2 * self.prompt_tokens * lengths.mean + lengths.second_moment
        return second / first / 2


@dataclass(frozen=True)
class Lengths:
    """Log-normal completion lengths, cut at `limit`, with the given mean after the cut; `count` samples are drawn."""

    mean: float
    limit: float
    sigma: float
    count: int

    @property
    def buckets(self) -> list[tuple[float, float]]:
        """(length, share of the samples), lengths rising; the tail is split down to one sample."""
        return _buckets(self.mean, self.limit, self.sigma, self.count)

    @property
    def second_moment(self) -> float:
        return sum(share * length**2 for length, share in self.buckets)

    @property
    def longest(self) -> float:
        return self.buckets[-1][0]


@cache
def _shares(count: int) -> tuple[tuple[float, float], ...]:
    """(standard normal quantile, share): even slices up to 0.9, then halving slices down to one sample."""
    edges = [i / 20 for i in range(19)]
    rest = 0.1
    while rest > 1 / count and rest > 1e-6:
        rest /= 2
        edges.append(1 - rest)
    edges.append(1.0)
    normal = NormalDist()
    mids = [((low + high) / 2, high - low) for low, high in pairwise(edges)]
    return tuple((normal.inv_cdf(mid), share) for mid, share in mids if share > 0)


@cache
def _buckets(mean: float, limit: float, sigma: float, count: int) -> list[tuple[float, float]]:
    shares = _shares(max(count, 10))
    if mean >= 0.999 * limit:
        return [(limit, 1.0)]

    def cut(location: float) -> list[tuple[float, float]]:
        return [(min(limit, math.exp(location + sigma * z)), share) for z, share in shares]

    low, high = math.log(mean) - 3 * sigma**2 - 1, math.log(limit) + 4 * sigma + 1
    for _ in range(50):
        middle = (low + high) / 2
        if sum(length * share for length, share in cut(middle)) < mean:
            low = middle
        else:
            high = middle
    return cut((low + high) / 2)


HEADROOM = {"fast": 0.95, "cheap": 0.95, "safe": 0.82}
"""Share of a device's memory that a plan may count on, by goal."""


@dataclass(frozen=True)
class TeacherWork:
    """The work of the teachers of a run in a step, which compute in turn in the same processes."""

    teachers: int = 1
    passes: float = 1.0
    """Forward passes over a row of all its teachers, with sources of equal size."""
    looks: int = 1
    """Rounds in which teachers are asked."""
    lists: int = 1
    """Lists of most likely tokens whose log-probs a teacher gives at each position."""
    compared: int = 1
    """Lists of most likely tokens whose log-probs the policy computes at each position."""

    @property
    def swaps(self) -> int:
        """Times that a model's processes read the weights of another teacher of its architecture. A step begins with
        the last one of the step before."""
        return (self.teachers - 1) * self.looks


@dataclass(frozen=True)
class Request:
    """Everything that a plan depends on. `pins` are configuration keys with the values they must have."""

    facts: ModelFacts
    cluster: ClusterFacts
    workload: Workload = field(default_factory=Workload)
    pins: Mapping[str, Any] = field(default_factory=dict)
    constants: Constants = DEFAULTS
    training_precision: Precision | None = None
    """None: float32 on a CPU, and bfloat16 on a GPU."""
    adapters: LoraChoice | None = None
    """They are trained instead of the weights."""
    engine: EngineNumbers = PLAIN_ENGINE
    grouped_experts: bool = True
    """Megatron computes the experts of a rank as one product."""
    gradient_bytes: int = 4
    moment_bytes: int = 8
    teacher: ModelFacts | None = None
    """A model that is not trained and computes on the policy's devices: a teacher, or a reward model."""
    further_teachers: tuple[ModelFacts, ...] = ()
    """Facts of the teachers behind the first."""
    role: Literal["teacher", "reward_model"] = "teacher"
    """The section of that model's layout."""
    teaching: TeacherWork = TeacherWork()
    """The work of several teachers."""
    backend: str = "megatron"
    """The backend that trains, also where none is pinned."""
    saves: bool = True
    """Checkpoints are written."""
    save_copies: bool | None = None
    """Saves copy states to host memory; None: where it suffices."""
    discards: bool = False
    """Sleeping engines keep no copy of their weights before a refit."""
    memory_checkpoint_every: int | None = 0
    """Interval of checkpoints in the memory of hosts; 0: none; None: each step on GPUs, where it suffices."""
    own_layers: bool = False
    """Megatron's own layers train, and not TransformerEngine's fused ones."""
    dispatcher: Literal["alltoall", "flex"] = "alltoall"
    """Megatron's token dispatcher; `flex` is DeepEP or HybridEP."""
    muon_steps: int = 0
    """Newton-Schulz steps of Muon; 0: AdamW."""

    def pin(self, key: str, default: Any = None) -> Any:
        value = self.pins.get(key)
        return default if value is None else value

    @property
    def names_stage_layers(self) -> bool:
        """Whether the layers of the first or the last pipeline stage are pinned."""
        return any(self.pins.get(f"training.{end}_stage_layers") for end in ("first", "last"))

    def values(self, key: str, options: list[int]) -> list[int]:
        value = self.pins.get(key)
        return options if value is None else [value]

    @property
    def of_teacher(self) -> str:
        """The name of the model that computes next to the policy, in texts."""
        return self.role.replace("_", " ")

    @property
    def precision(self) -> Precision:
        return self.training_precision or ("float32" if self.cluster.is_cpu else "bf16")

    @property
    def generation_bytes(self) -> float:
        return 4.0 if self.precision == "float32" else 2.0

    @property
    def fsdp(self) -> bool:
        """Whether FSDP2 trains."""
        return self.backend == "dtensor"

    @property
    def budget(self) -> float:
        """Bytes that the phases may use on one device (on a CPU: all processes of a node together)."""
        return HEADROOM[self.workload.goal] * self.cluster.device.memory * (0.9 if self.cluster.is_cpu else 1.0)
