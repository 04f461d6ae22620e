"""From what vLLM answered for the samples of a prompt to their rollout columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlctl.backends.vllm.inflight import Sample
from rlctl.data.rollouts import ROUTED_EXPERTS, RolloutColumns
from rlctl.errors import WorkerError


def columns_of(prompt: Sequence[int], samples: Sequence[Sample], routed: Sequence[np.ndarray | None]) -> RolloutColumns:
    """The group's columns: prompt and completion of each sample, one behind the other.

    `routed`: the experts of each sample's tokens, int16 [tokens, layers, experts a token], where they were recorded.
    Raises WorkerError where vLLM's record lacks a log-prob.
    """
    lengths = [len(prompt) + sample.tokens for sample in samples]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = np.zeros(offsets[-1], np.int32)
    mask = np.zeros(offsets[-1], bool)
    logprobs = np.zeros(offsets[-1], np.float32)
    versions = np.full(offsets[-1], -1, np.int32)
    for begin, sample in zip(offsets, samples, strict=False):
        first = begin + len(prompt)
        chosen = slice(first, first + sample.tokens)
        tokens[begin:first] = prompt
        tokens[chosen] = sample.output.token_ids
        mask[chosen] = True
        logprobs[chosen] = _chosen_logprobs(sample.output)
        versions[chosen] = sample.versions
    known = [one for one in routed if one is not None]
    further = {ROUTED_EXPERTS: np.concatenate(known)} if len(known) == len(samples) else {}
    return RolloutColumns(tokens, offsets, mask, logprobs, versions, further)


def _chosen_logprobs(completion: Any) -> list[float]:
    """The log-prob of each token of the completion. Raises WorkerError where vLLM's record lacks one."""
    record = completion.logprobs
    if record is None or len(record) != len(completion.token_ids):
        raise WorkerError(f"vLLM returned {len(record or ())} log-probs for {len(completion.token_ids)} tokens.")
    return [record[index][token].logprob for index, token in enumerate(completion.token_ids)]
