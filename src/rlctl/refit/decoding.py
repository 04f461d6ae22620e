"""Check an engine's computation: compare decoded tokens' log-probs with the policy's. Reading parameters cannot reveal
stale decode graphs or caches."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlctl.backends.batching.batch import LogprobStats, TrainBatch, WeightedSequence
from rlctl.backends.clients import EngineClient, PolicyClient
from rlctl.backends.messages import GroupRequest, SampledGroup, Sampling
from rlctl.data.chat import EncodedPrompt
from rlctl.data.rollouts import contexts_of
from rlctl.errors import RlctlError, VerificationError

PROMPTS, NEW_TOKENS = 2, 8
SHOWN = PROMPTS + 1
"""Group of the prompt with an image."""
PROMPT_TOKENS = 40
"""More than one cache block's tokens, to also test cached prompts."""


OF_IMAGES = (
    "Prompts of text alone agree: engine and policy read the pixels of an image differently, or the engine still has "
    "what earlier weights made of it."
)


def policy_difference(policy: PolicyClient, results: list[SampledGroup]) -> LogprobStats:
    """Compare the engine's log-probs of its tokens with the policy's forward pass. Replaces the policy's loaded
    batch."""
    rows = [
        WeightedSequence(r.group, row, r.prompt_tokens, tokens, 0.0, 1.0, begin)
        for r in results
        for row, whole in enumerate(r.tokens)
        for begin, tokens in contexts_of(whole, r.episodes[row] if r.episodes else None)
    ]
    policy.load_batch(TrainBatch((tuple(rows),), {r.group: r.columns for r in results}))
    policy.add_logprobs("old_logprobs")
    return policy.logprob_difference("old_logprobs")


def fixed_prompts(vocabulary: int, longest: int, count: int) -> list[tuple[int, ...]]:
    lengths = (min(longest, PROMPT_TOKENS + 11 * i) for i in range(count))
    return [tuple((7 * i + 13 * j) % vocabulary for j in range(length)) for i, length in enumerate(lengths)]


@dataclass(frozen=True)
class DecodeCheck:
    """A few short completions of every engine, compared with the policy after a refit that was verified."""

    limit: float
    """Mean absolute difference of the log-probs that two correct engines stay below (checks.logprob_diff_error)."""
    vocabulary: int
    max_length: int
    """Most tokens of a sequence in the engines."""
    sampling: Sampling
    """The policy's temperature and truncation, and the token limit of a completion."""
    without_graphs: str = ""
    """Flag for decoding without graphs; empty: none."""
    shown: EncodedPrompt | None = None
    """A prompt with an image, where the model takes images."""

    def decode(self, engines: EngineClient, version: int, timeout_s: float) -> list[list[SampledGroup]]:
        """Return each engine's completions; the last one is one token after a new prompt. Raises an engine's error."""
        new = min(self.sampling.max_new_tokens, self.max_length - 1)
        prompts = fixed_prompts(self.vocabulary, self.max_length - new, PROMPTS)
        unseen = tuple((token + version) % self.vocabulary for token in reversed(prompts[0]))
        outcomes: list[list[SampledGroup]] = [[] for _ in range(len(engines))]
        for first, requested, tokens in ((0, prompts, new), (PROMPTS, [unseen], 1)):
            requests = [GroupRequest(i, prompt, (1000 * version + i,)) for i, prompt in enumerate(requested, first)]
            if first == 0 and self.shown is not None and len(self.shown.tokens) <= self.max_length - new:
                fixed_prompt = GroupRequest(SHOWN, self.shown.tokens, (1000 * version + SHOWN,), media=self.shown.media)
                requests.append(fixed_prompt)
            sampling = replace(self.sampling, max_new_tokens=tokens)
            for engine_outcomes, outcome in zip(
                outcomes, engines.generate([requests] * len(outcomes), sampling, timeout_s), strict=True
            ):
                if isinstance(outcome, RlctlError):
                    raise outcome
                engine_outcomes += outcome
        return outcomes

    def compare(
        self, policy: PolicyClient, decoded: list[list[SampledGroup]], version: int, tensors: int, *, agreed: bool
    ) -> float:
        """Return the mean absolute difference over engines after `tensors` equal tensors; `agreed`: an earlier check
        passed. Raises VerificationError naming the first engine beyond the limit."""
        differences = [policy_difference(policy, results) for results in decoded]
        for index, gap in enumerate(differences):
            if not gap.mean_abs <= self.limit:  # also where it is not a number
                texts = policy_difference(policy, [r for r in decoded[index] if r.group != SHOWN])
                unseen = policy_difference(policy, [r for r in decoded[index] if r.group == PROMPTS])
                cause = OF_IMAGES if texts.mean_abs <= self.limit else self._cause(unseen, agreed=agreed)
                raise VerificationError(
                    f"Refit to version {version}: the tensors are equal (all {tensors} that were compared in engine "
                    f"{index}), but its computation differs: its log-probs of {gap.tokens} tokens are off "
                    f"from the policy's by {gap.mean_abs:.2g} on average, {gap.max_abs:.2g} at most (limit "
                    f"{self.limit:g}).",
                    f"{cause} The engine refuses to generate. `rlctl diverge` names "
                    "the first sub-layer where they part; --set checks.logprob_diff_error=... continues anyway.",
                )
        return sum(gap.abs_sum for gap in differences) / max(1, sum(gap.tokens for gap in differences))

    def _cause(self, unseen: LogprobStats, *, agreed: bool) -> str:
        """Explain a difference: the first token after a new prompt needs neither decode graph nor cache, and stale
        weights need an earlier agreement."""
        if unseen.mean_abs <= self.limit or agreed:
            graphs = f" {self.without_graphs} decodes without graphs." if self.without_graphs else ""
            return f"It decodes with a graph or a cache that still has earlier weights.{graphs}"
        return (
            "Engine and policy compute the model by different arithmetic. No graph or cache of earlier weights has a "
            "part in it: the first token behind a prompt that the engine had not seen is off as well, by "
            f"{unseen.mean_abs:.2g}. They read something in config.json differently, such as rotary scaling or the "
            "router; --backend dtensor computes the policy as transformers does."
        )
