"""What runs inside the pool's processes for a policy with a critic, and the same in transformers and plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlctl.backends.base import CriticSpec
from rlctl.backends.batching.batch import MinibatchResult, WeightedSequence
from rlctl.backends.clients import only_result
from rlctl.backends.dtensor.tensor_parallel import local_part
from rlctl.backends.dtensor.worker import HEAD as MODULE_HEAD
from rlctl.backends.dtensor.worker import DTensorWorker
from rlctl.methods.rl.critic import ClippedValueLoss, TokenAdvantages
from rlctl.methods.rl.rl_config import RlConfig
from support.parallel_cases import (
    Batch,
    Case,
    Loss,
    Model,
    Piece,
    column_by_rollout,
    fill,
    gather_gradients,
    load_batch,
    make_worker,
    memory_of,
    pieces,
    rows_of,
    spec_of,
    whole,
)
from support.reference_policy import Optim, close, facts, hf_model, megatron_weights

CLIP = 0.05
GAMMA, LAMBDA = 0.98, 0.9
CONFIG = RlConfig.model_validate(
    {
        "advantage": {"baseline": "critic", "normalize_std": False, "whiten": True},
        "critic": {"gamma": GAMMA, "gae_lambda": LAMBDA},
    }
)
HEAD = "output_layer.weight"
COLUMNS = ("values", "returns", "advantages")
LEFT_OUT = (2, 1)
"""A rollout that has weight 0 in the loss."""


@dataclass
class Critics:
    """What is made of a batch in two optimizer steps of a critic, by rollout and by Megatron's names."""

    columns: dict[str, dict[tuple[int, int], Tensor]] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    grads: dict[str, Tensor] = field(default_factory=dict)
    params: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class CriticPiece:
    """One rank's part of it, by the names of its backend, and whether the policy stayed as it was."""

    piece: Piece
    columns: dict[str, dict[tuple[int, int], Tensor]]
    policy_stayed: bool


def head_of(kind: str) -> Tensor:
    """Weights of a value head that is not 0, whose gradient the other weights see."""
    generator = torch.Generator().manual_seed(7)
    return 0.1 * torch.randn(1, facts(kind).hidden, generator=generator)


def rewarded(batch: Batch) -> list[WeightedSequence]:
    """The rollouts with their rewards where advantages are, one of them left out."""
    rows = rows_of(batch)
    return [row._replace(token_weight=0.0) if (row.position, row.sample) == LEFT_OUT else row for row in rows]


def make_critic(rank: int, case: Case, model: Model, *, offload: bool = False, load: bool = True) -> Any:
    """A policy with a critic, both on the reference's weights, and a head that is not 0."""
    worker = make_worker(rank, case, model, load=load, critic=CriticSpec(spec_of(case).optimizer, offload))
    if not load or model is None:
        return worker
    worker.critic_begin()
    if isinstance(worker, DTensorWorker):
        head = local_part(worker.critic.model.get_parameter("head.weight").detach())
        assert not head.any()
        head.copy_(head_of(case.kind)[: head.shape[0]])  # of its one row, the first shard has all
    else:
        fill(worker.critic, model | {HEAD: head_of(case.kind)})
    worker.critic_end()
    return worker


def critic_pieces(worker: Any, case: Case, what: str) -> list[Any]:
    """As `pieces`, of the critic, by Megatron's names. Collective."""
    critic = worker.critic
    if not isinstance(critic, DTensorWorker):
        return list(pieces(critic, what))
    critic._reshard()
    named = dict(critic.saved())
    if what == "grad":
        parameters = {name.removeprefix("inner."): p.grad for name, p in critic.model.named_parameters()}
        named = {name: value for name, value in parameters.items() if value is not None}
        named[MODULE_HEAD] = named.pop("head.weight")
    found = {name: whole(value) for name, value in named.items()}
    head = found.pop(MODULE_HEAD)
    found = named_for(case.kind, found) | {HEAD: head}
    return [(name, value, 0, 1, None) for name, value in found.items() if worker.rank == 0]


def run_critic(rank: int, case: Case, model: Model, batch: Batch) -> CriticPiece:
    """Advantages, and two optimizer steps of the critic. It takes turns with the policy; under data parallelism it
    stays next to it, and both sleep between the steps."""
    turns = case.parallel.dp == 1
    worker = make_critic(rank, case, model, offload=turns)
    before = {name: value.clone() for name, value in worker.parameters().items()}
    shard = load_batch(worker, rank, case, batch, rewarded(batch))
    results, grads = [], []
    worker.critic_begin()
    worker.estimate(TokenAdvantages(CONFIG))
    for step in range(2):
        results.append(worker.train_critic(0, ClippedValueLoss(CLIP), Optim().lr))
        if step == 0:
            gather_gradients(worker.critic)
            grads = critic_pieces(worker, case, "grad")
        if step == 0 and not turns:
            sleep_together(worker)
    params = critic_pieces(worker, case, "data")
    worker.critic_end()
    stayed = all(torch.equal(before[name], value) for name, value in worker.parameters().items())
    columns = {column: column_by_rollout(worker, shard, column) for column in COLUMNS}
    return CriticPiece(Piece(results, {}, grads, params), columns, stayed)


def sleep_together(worker: Any) -> None:
    """Put both models to sleep, the policy's weights later as for a refit, and wake them."""
    worker.critic_end()
    assert 0 < worker.sleep(keep_weights=True) < worker.sleep()
    assert not sum(value.untyped_storage().nbytes() for one in (worker, worker.critic) for value in memory_of(one))
    worker.wake()
    worker.critic_begin()


def run_critic_checkpoint(
    rank: int, before: Case, after: Case, model: Model, batch: Batch, directory: Path
) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """(results, parameters of both models) of the second step: uninterrupted, and after save, rebuild as `after`,
    load."""
    worker = make_critic(rank, before, model, offload=True)
    step_both(worker, before, batch, rank)
    assert worker.parameters_not_finite() == []
    worker.save_begin(directory)
    assert worker.damaged_files(directory, worker.save_finish()) == []
    straight = step_both(worker, before, batch, rank)
    kept = _all_pieces(worker, before)
    worker = make_critic(rank, after, model, load=False)
    worker.load_saved(directory)
    return [straight], kept, [step_both(worker, after, batch, rank)], _all_pieces(worker, after)


def run_critic_changed(
    rank: int, case: Case, directory: Path, weights: dict[str, Tensor], batch: Batch, places: list[Path]
) -> list[Any]:
    """(critic's, policy's) result of Megatron's second step, of the dtensor backend's that goes on after the first, and
    of Megatron's that goes on with what the dtensor backend saved before its step."""
    for place in places:
        place.mkdir(exist_ok=True)
    torch.distributed.barrier()
    worker = make_critic(rank, case, weights)
    step_both(worker, case, batch, rank)
    results = []
    for number, place in enumerate([*places, None]):
        if place is not None:
            worker.save_begin(place)
            worker.save_finish()
        results.append(step_both(worker, case, batch, rank))
        if place is not None:
            other = replace(case, backend="megatron" if number else "dtensor")
            worker = make_critic(rank, other, None if number else directory, load=False)
            worker.load_saved(place)
    return results


def require_columns_and_steps(
    ranks: Sequence[Any], results: Sequence[Sequence[MinibatchResult | None]], expected: Critics
) -> None:
    """Check that the ranks' columns and step results equal the reference's, and that the policy is unchanged."""
    assert all(rank.policy_stayed for rank in ranks)
    for column in COLUMNS:
        found = {key: value for rank in ranks for key, value in rank.columns[column].items()}
        assert found.keys() == expected.columns[column].keys()
        for key, value in expected.columns[column].items():
            assert close(found[key], value, 1e-5), (column, key)
    for step in range(2):
        result = only_result([of_rank[step] for of_rank in results])
        for ours, theirs in ((result.loss, expected.losses[step]), (result.grad_norm, expected.norms[step])):
            assert abs(ours - theirs) <= 1e-6 * max(1, abs(theirs))


def step_both(
    worker: Any, case: Case, batch: Batch, rank: int
) -> tuple[MinibatchResult | None, MinibatchResult | None]:
    """Train the critic and then the policy on the batch."""
    load_batch(worker, rank, case, batch, rewarded(batch))
    worker.critic_begin()
    worker.estimate(TokenAdvantages(CONFIG))
    of_critic = worker.train_critic(0, ClippedValueLoss(CLIP), Optim().lr)
    worker.critic_end()
    return of_critic, worker.train_minibatch(0, Loss(), Optim().lr)


def _all_pieces(worker: Any, case: Case) -> list[Any]:
    worker.critic_begin()
    own = [(f"critic.{name}", *rest) for name, *rest in critic_pieces(worker, case, "data")]
    worker.critic_end()
    return [*own, *pieces(worker, "data")]


def run_loaded(rank: int, case: Case, directory: Path) -> list[Any]:
    """The critic's parameters after a model was loaded for both."""
    worker = make_critic(rank, case, None)
    worker.load_model(directory)
    return list(pieces(worker.critic, "data"))


# --- the same, one rollout at a time


def reference_critic(kind: str, batch: Batch) -> Critics:
    """Two optimizer steps of torch's AdamW on transformers' model with a head, advantages by loops in float64."""
    model, optim, out = hf_model(kind), Optim(), Critics()
    head = torch.nn.Parameter(head_of(kind))
    values_of = _Values(model, head)
    rows = rewarded(batch)
    with torch.no_grad():
        old = {(row.position, row.sample): values_of(batch, row) for row in rows}
    out.columns = _targets(old, rows)
    named = {name: p for name, p in model.named_parameters() if not name.startswith("lm_head")}
    decay = [p for p in named.values() if p.dim() > 1]
    plain = [p for p in named.values() if p.dim() == 1]
    groups = [{"params": [*decay, head], "weight_decay": optim.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps)
    for step in range(2):
        adam.zero_grad()
        total = 0.0
        for row in rows:
            key = row.position, row.sample
            values, returns = values_of(batch, row), out.columns["returns"][key]
            clipped = old[key] + (values - old[key]).clamp(-CLIP, CLIP)
            worse = torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)
            loss = row.token_weight * 0.5 * worse.sum()
            loss.backward()
            total += loss.item()
        if step == 0:
            out.grads = named_for(
                kind, {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named.items()}
            )
            out.grads[HEAD] = torch.zeros_like(head) if head.grad is None else head.grad.clone()
        out.losses.append(total)
        out.norms.append(float(torch.nn.utils.clip_grad_norm_([*named.values(), head], optim.clip)))
        adam.step()
    out.params = named_for(kind, {n: p.detach() for n, p in (*named.items(), *_buffers(model))})
    out.params[HEAD] = head.detach()
    return out


class _Values:
    """The value of each chosen token, before it, by a model of transformers without its output layer."""

    def __init__(self, model: Any, head: Tensor) -> None:
        self._model, self._head = model, head

    def __call__(self, batch: Batch, row: WeightedSequence) -> Tensor:
        columns = batch[row.position]
        span = columns.slice(row.sample)
        tokens = torch.from_numpy(columns.tokens_T[span].astype("int64"))
        mask = torch.from_numpy(columns.loss_mask_T[span])[1:]
        hidden = self._model.model(tokens[None]).last_hidden_state[0]
        return (hidden[:-1] @ self._head[0])[mask]


def _buffers(model: Any) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in model.named_buffers() if "e_score_correction_bias" in name]


def named_for(kind: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a model without an output layer by Megatron's names, from transformers'."""
    embedding = weights["model.embed_tokens.weight"]
    found = megatron_weights(kind, weights | {"lm_head.weight": embedding})
    return {name: value for name, value in found.items() if name != HEAD}


def _targets(
    old: dict[tuple[int, int], Tensor], rows: list[WeightedSequence]
) -> dict[str, dict[tuple[int, int], Tensor]]:
    """Values, returns and whitened advantages of each rollout."""
    advantages: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        values = [float(v) for v in old[row.position, row.sample]]
        found, following, later = [], 0.0, 0.0
        for t in reversed(range(len(values))):
            reward = row.advantage if t == len(values) - 1 else 0.0
            delta = reward + GAMMA * following - values[t]
            later = delta + GAMMA * LAMBDA * later
            following = values[t]
            found.append(later)
        advantages[row.position, row.sample] = found[::-1]
    returns = {key: torch.tensor(found) + old[key] for key, found in advantages.items()}
    counted = [a for key, found in advantages.items() if key != LEFT_OUT for a in found]
    mean = sum(counted) / len(counted)
    std = (sum((a - mean) ** 2 for a in counted) / len(counted)) ** 0.5
    white = {key: (torch.tensor(found) - mean) / (std + 1e-6) for key, found in advantages.items()}
    return {"values": old, "returns": returns, "advantages": white}
