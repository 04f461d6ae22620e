"""Log-probs of the reference model that are computed once, before the first step (`preference.precompute`)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rlctl.backends.batching.batch import GroupLogprobs
from rlctl.backends.clients import PolicyClient
from rlctl.cluster.ray_session import fetch
from rlctl.config.files import write_json
from rlctl.data.prompt_rows import PromptRow
from rlctl.rollouts.dataset import ReferenceLogps, TextStream, groups_of, reference_key
from rlctl.training.method import Method

KEPT_EVERY = 100
"""Batches after which log-probs are written."""


def precompute_reference(
    path: Path,
    policy: PolicyClient,
    method: Method,
    parts: Iterable[tuple[str, TextStream, list[PromptRow], dict[str, Any]]],
    rows_at_once: int,
) -> None:
    """Compute the log-probs of rows under the policy's current weights, and store them in their streams and in `path`.

    Log-probs in `path` are not computed again. A part is (name, stream, rows that the run will use, fingerprint of the
    data).
    """
    stored = json.loads(path.read_text()) if path.exists() else {}
    for name, stream, rows, fingerprint in parts:
        kept = stored.get(name, {})
        logps: ReferenceLogps = kept["logps"] if kept.get("data") == fingerprint else {}
        stored[name] = {"data": fingerprint, "logps": logps}
        lacking = [row for row in rows if reference_key(row) not in logps and not stream.brings_reference(row)]
        for first in range(0, len(lacking), rows_at_once):
            logps |= _computed(policy, method, stream, lacking[first : first + rows_at_once])
            if first % (KEPT_EVERY * rows_at_once) == 0:  # a stopped run resumes from the written part
                write_json(path, stored)
        stream.reference = logps
    write_json(path, stored)


def _computed(policy: PolicyClient, method: Method, stream: TextStream, rows: list[PromptRow]) -> ReferenceLogps:
    groups = groups_of(stream, dict(enumerate(rows)))
    if not groups:
        return {}
    policy.load_batch(method.train_batch(groups, 1))
    computed_logps: ReferenceLogps = {}
    for position, handles in policy.export_logprobs().items():
        parts: GroupLogprobs = {key: values for part in fetch(list(handles)) for key, values in part.items()}
        sums = [float(parts[key].logprobs_R.sum(dtype="float64")) for key in sorted(parts)]
        computed_logps[reference_key(rows[position])] = (sums[0], sums[1])
    return computed_logps
