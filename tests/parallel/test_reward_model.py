"""Scores of a published reward model under each layout, against transformers' class for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rlctl.backends.batching.batch import WeightedSequence
from rlctl.checkpoints.conversion.prepared_model import body_of
from rlctl.checkpoints.hf.model_facts import facts_in
from rlctl.config.parallel import ParallelSpec
from rlctl.rewards.reward_worker import common_prefix, text_columns
from support.parallel_cases import Case
from support.pool import Pools, slowly
from support.reference_policy import VOCAB, kind_of
from support.teacher_logprobs import run_scorer

LAYOUTS = {"alone": {}, "tp2": {"tp": 2}, "dp2": {"dp": 2}, "pp2": {"pp": 2}, "cp2": {"cp": 2}}
CASES = {
    f"{backend}-{name}": (backend, ParallelSpec(**sizes))
    for backend in ("megatron", "dtensor")
    for name, sizes in LAYOUTS.items()
    if (backend, name) != ("dtensor", "pp2")
}


def texts() -> list[list[np.ndarray]]:
    """Groups of texts that begin alike, one of them with two that are the same."""
    random = np.random.default_rng(3)
    found = []
    for prompt, lengths in ((5, (4, 9, 1)), (11, (3, 3)), (2, (20,))):
        head = random.integers(0, VOCAB, prompt)
        found.append([np.append(head, random.integers(0, VOCAB, length)).astype(np.int32) for length in lengths])
    found[1][1] = found[1][0]
    return found


@pytest.mark.parametrize("name", slowly(CASES.keys(), "megatron-tp2", "dtensor-dp2"))
def test_scores_are_those_of_transformers(
    pools: Pools, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForSequenceClassification

    monkeypatch.setenv("RLCTL_MEGATRON_CHECKPOINT_DIR", str(tmp_path / "converted"))
    backend, parallel = CASES[name]
    kind = "llama" if backend == "megatron" else "qwen3"
    _, config = kind_of(kind)
    config.num_labels, config.pad_token_id = 1, 0
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.save_pretrained(tmp_path / "published")
    groups = texts()
    with torch.no_grad():
        # A row without padding has its score at its last token, whatever token that is.
        wanted = [
            [
                model.score(model.model(torch.from_numpy(text)[None].long()).last_hidden_state)[0, -1, 0]
                for text in group
            ]
            for group in groups
        ]

    batch = {place: text_columns(group) for place, group in enumerate(groups)}
    rows = [
        WeightedSequence(place, sample, common_prefix(group), len(text) + 1, 0.0, 1.0)
        for place, group in enumerate(groups)
        for sample, text in enumerate(group)
    ]
    assert {row.prompt_tokens for row in rows} == {5, 14, 22}
    body = body_of(tmp_path / "published").directory
    case = Case(parallel=parallel, backend=backend)
    ranks = pools(parallel.world_size).run(run_scorer, case, body, facts_in(body), batch, rows)
    found = {
        (place, sample): float(one.logprobs_R[-1])
        for own in ranks
        for place, group in own.items()
        for (sample, _), one in group.items()
    }
    assert len(found) == len(rows)
    for (place, sample), value in found.items():
        assert value == pytest.approx(float(wanted[place][sample]), abs=1e-4), (place, sample)
