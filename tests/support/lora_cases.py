"""Functions for the pool's processes that train adapters with any backend, and references in transformers and torch."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlctl.backends.dtensor.lora import set_part
from rlctl.backends.dtensor.worker import DTensorWorker
from rlctl.checkpoints.identity import model_fingerprint
from rlctl.models.facts import ModelFacts
from rlctl.settings.training import LoraConfig
from rlctl.weights.layout import Span
from support.parallel_cases import (
    WEIGHT,
    Batch,
    Case,
    Loss,
    Model,
    column_by_rollout,
    gather_gradients,
    load_batch,
    make_worker,
    memory_of,
    pieces,
)
from support.reference_policy import (
    Optim,
    advantage,
    hf_model,
    make_batch,
    megatron_weights,
    reference_logprobs,
    token_loss,
)

LORA = LoraConfig(rank=3, alpha=6.0)
SCALE = LORA.alpha / LORA.rank
SHARED = (
    ("q_proj", "k_proj", "v_proj"),
    ("o_proj",),
    ("q_b_proj",),
    ("kv_b_proj",),
    ("gate_proj", "up_proj"),
    ("down_proj",),
)
"""Layers of one module that share A."""


@cache
def adapters_of(kind: str) -> dict[str, Tensor]:
    """Random A and B of each adapted layer of a model, by transformers' names; both count."""
    generator, found = torch.Generator().manual_seed(5), dict[str, Tensor]()
    weights = {name.removesuffix(".weight"): value for name, value in hf_model(kind).state_dict().items()}
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in weights):
        for layers in SHARED:
            names = [f"{parent}.{layer}" for layer in layers if f"{parent}.{layer}" in weights]
            if not names or weights[names[0]].dim() != 2:
                continue
            a = 0.1 * torch.randn(LORA.rank, weights[names[0]].shape[1], generator=generator)
            for name in names:
                found[f"{name}.lora_a"] = a
                found[f"{name}.lora_b"] = 0.1 * torch.randn(weights[name].shape[0], LORA.rank, generator=generator)
    return found


def merge(base: dict[str, Tensor], lora: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a model with adapters."""
    found = dict(base)
    for name in [name.removesuffix(".lora_a") for name in lora if name.endswith("lora_a")]:
        found[f"{name}.weight"] = base[f"{name}.weight"] + SCALE * lora[f"{name}.lora_b"] @ lora[f"{name}.lora_a"]
    return found


class Expected:
    """Two steps of torch's AdamW on A and B, through transformers' model on the merged weights."""

    def __init__(self, kind: str) -> None:
        model, optim = hf_model(kind), Optim()
        tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
        self.base = {name: value for name, value in model.state_dict().items() if name not in tied}
        trained = {id(value): value.clone().requires_grad_() for value in adapters_of(kind).values()}
        lora = {name: trained[id(value)] for name, value in adapters_of(kind).items()}
        adam = torch.optim.AdamW(
            trained.values(), lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps,
            weight_decay=optim.weight_decay,
        )  # fmt: skip
        self.norms, self.losses = list[float](), list[float]()
        for step in range(2):
            adam.zero_grad()
            weights = merge(self.base, lora)
            logprobs = reference_logprobs(model, weights, make_batch())
            if step == 0:
                self.logprobs = {key: value[0].detach() for key, value in logprobs.items()}
                self.merged = {name: value.detach() for name, value in weights.items()}
            loss = torch.zeros(())
            for key, columns in logprobs.items():
                loss = loss + token_loss(*columns, torch.tensor(advantage(*key)), torch.tensor(WEIGHT))
            loss.backward()
            self.losses.append(float(loss.detach()))
            if step == 0:
                self.grads = {name: value.grad.clone() for name, value in lora.items() if value.grad is not None}
            self.norms.append(float(torch.nn.utils.clip_grad_norm_(trained.values(), optim.clip)))
            adam.step()
        self.lora = {name: value.detach() for name, value in lora.items()}
        plain = reference_logprobs(model, self.base, make_batch())
        self.base_logprobs = {key: value[0].detach() for key, value in plain.items()}


@cache
def expected(kind: str) -> Expected:
    return Expected(kind)


NAMES = {
    "q_proj": "linear_qkv", "o_proj": "linear_proj", "q_b_proj": "linear_q_up_proj", "kv_b_proj": "linear_kv_up_proj",
    "gate_proj": "linear_fc1", "down_proj": "linear_fc2",
}  # fmt: skip
"""The first layer of each of `SHARED`, and Megatron's."""


def megatron_adapters(kind: str, lora: dict[str, Tensor]) -> dict[str, Tensor]:
    """Adapters (or their gradients) by Megatron's names, whose layers have the rows of B of all that share their A."""
    whole = {name.replace("lora_b", "weight"): value for name, value in lora.items() if name.endswith("lora_b")}
    rows = megatron_weights(kind, hf_model(kind).state_dict() | whole)
    found = {}
    for name, value in lora.items():
        parent, leaf, which = name.rsplit(".", 2)
        if which == "lora_a" and leaf in NAMES:
            layer = parent.replace("model.layers", "decoder.layers").replace("self_attn", "self_attention")
            found[f"{layer}.{NAMES[leaf]}.lora_a"] = value
            found[f"{layer}.{NAMES[leaf]}.lora_b"] = rows[f"{layer}.{NAMES[leaf]}.weight"]
    return found


def adapted_worker(rank: int, case: Case, model: Model) -> Any:
    """A worker on the model's weights, with the adapters of `adapters_of`."""
    whole = adapters_of(case.kind)
    if isinstance(model, dict):
        worker = make_worker(rank, replace(case, lora=LORA), model | megatron_adapters(case.kind, whole))
    else:
        worker = make_worker(rank, replace(case, lora=LORA), model)
        named = worker.saved()
        assert named.keys() == whole.keys()
        for name, value in named.items():
            set_part(worker.layouts(), rank, name, value, whole[name])
    worker.merge_adapters()
    return worker


def parts_agree(worker: DTensorWorker, wanted: dict[str, Tensor]) -> float:
    """The largest difference of what a refit would read of this rank to its part of whole weights."""
    world, worst = worker.layouts(), 0.0
    parallel = world.parallel
    tp, shard = worker.rank % parallel.tp, worker.rank // parallel.tp % parallel.fsdp_shards
    for name, value in worker.parameters().items():
        whole = wanted[name].view(world.modules.params[name].shape)  # gate and up of experts are apart there
        box: tuple[Span, ...] = world._box(name, tuple(whole.shape), tp, shard)
        part = whole[tuple(slice(span.start, span.start + span.count) for span in box)]
        assert part.shape == value.shape
        worst = max(worst, float((value - part).abs().max())) if part.numel() else worst
    return worst


def run_adapters(
    rank: int, case: Case, after: Case, model: Model, batch: Batch, merged: dict[str, Tensor], saved: Path | None
) -> dict[str, Any]:
    """Two steps, with `saved` the second after a save and a load as `after`; and what a refit would read before."""
    worker = adapted_worker(rank, case, model)
    worker.hold_reference()
    of_modules = case.backend == "dtensor"
    out: dict[str, Any] = {
        "differs": parts_agree(worker, merged) if of_modules else 0.0,
        "merged": [] if of_modules else list(pieces(worker, "data")),
    }
    shard = load_batch(worker, rank, case, batch)
    worker.add_logprobs("old_logprobs")
    worker.add_logprobs("reference_logprobs")
    out["logprobs"] = column_by_rollout(worker, shard, "old_logprobs")
    out["reference"] = column_by_rollout(worker, shard, "reference_logprobs")
    out["results"] = [worker.train_minibatch(0, Loss(), Optim().lr)]
    gather_gradients(worker)
    out["grads"] = list(pieces(worker, "grad"))
    if saved is not None:
        worker.save_begin(saved)
        worker.train_minibatch(0, Loss(), Optim().lr)  # while the snapshot is written
        worker.save_finish()
        worker = make_worker(rank, replace(after, lora=LORA), model)
        worker.load_saved(saved)
        load_batch(worker, rank, after, batch)
    out["results"].append(worker.train_minibatch(0, Loss(), Optim().lr))
    out["params"] = list(pieces(worker, "data"))
    out["asleep"] = (worker.sleep(), sum(value.untyped_storage().nbytes() for value in memory_of(worker)))
    worker.wake()
    return out


def run_family(rank: int, case: Case, directory: Path, facts: ModelFacts, batch: Batch, saved: Path) -> dict[str, Any]:
    """Three steps with adapters of a family without a file, which are saved, and log-probs of the policy before the
    last one and behind it, the latter also after a load."""
    worker = make_worker(rank, replace(case, lora=LORA), directory, own_facts=facts)
    out: dict[str, Any] = {"results": []}

    def logprobs() -> dict[tuple[int, int], Tensor]:
        shard = load_batch(worker, rank, case, batch)
        worker.add_logprobs("old_logprobs")
        return column_by_rollout(worker, shard, "old_logprobs")  # type: ignore[arg-type]

    for _ in range(3):
        load_batch(worker, rank, case, batch)
        out["results"].append(worker.train_minibatch(0, Loss(), Optim().lr))
    out["logprobs"] = logprobs()
    worker.save_begin(saved)
    worker.save_finish()
    worker = make_worker(rank, replace(case, lora=LORA), directory, own_facts=facts)
    worker.load_saved(saved)
    out["loaded"] = logprobs()
    return out


def run_saved(rank: int, case: Case, model: Model, batch: Batch, saved: Path) -> dict[tuple[int, int], Tensor]:
    """Log-probs of a policy with adapters, which is saved."""
    worker = adapted_worker(rank, case, model)
    shard = load_batch(worker, rank, case, batch)
    worker.add_logprobs("old_logprobs")
    worker.save_begin(saved)
    worker.save_finish()
    return column_by_rollout(worker, shard, "old_logprobs")


def policy_of(run: Path, base: Path) -> Path:
    """The directory of a run's checkpoint, which is to be written; the run's manifest is there."""
    policy = run / "checkpoints" / "step_1" / "policy"
    policy.mkdir(parents=True)
    manifest = {
        "model": {"directory": str(base), "fingerprint": model_fingerprint(base)},
        "config": {"training.lora.rank": {"value": LORA.rank}, "training.lora.alpha": {"value": LORA.alpha}},
    }
    (run / "manifest.json").write_text(json.dumps(manifest))
    return policy
