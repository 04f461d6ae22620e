"""Functions for the pool's processes that train adapters with any backend, and references in transformers and torch."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlctl.backends.adapter_source import AdapterSource
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
    close,
    hf_model,
    make_batch,
    megatron_weights,
    reference_logprobs,
    token_loss,
)

LORA = LoraConfig(rank=3, alpha=6.0)
SCALE = LORA.alpha / LORA.rank
SETTINGS = {
    "gemma3": LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")),
    "qwen3moe": LoraConfig(
        rank=3, alpha=6.0, targets=("attention", "mlp.gate"), rank_pattern={"o_proj": 2}, alpha_pattern={"k_proj": 3.0}
    ),
    "deepseek": LoraConfig(
        rank=3, alpha=6.0, targets=("attention", "mlp", "q_a_proj", r"kv_a_proj_with_mqa", "mlp.gate"),
        exclude=("layers.1.self_attn.o_proj",), rank_pattern={r"shared_experts\.down_proj": 5}, rslora=True,
    ),
    "qwen3moe-experts": LoraConfig(rank=3, alpha=6.0, targets="all-linear", rank_pattern={r"experts\.down_proj": 2}),
    "gpt-oss-experts": LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "gate_up_proj", "down_proj", "mlp.router")),
    "qwen2-some": LoraConfig(rank=3, alpha=6.0, targets=("*layers.3.*_proj",), rank_pattern={"o_proj": 2}),
    "llama-whole": LoraConfig(rank=3, alpha=6.0, modules_to_save=("embed_tokens", "lm_head")),
    "llama-tied-whole": LoraConfig(rank=3, alpha=6.0, modules_to_save=("lm_head",)),
    "deepseek-experts": LoraConfig(rank=3, alpha=6.0, targets=("gate_proj", "up_proj", "down_proj"), rslora=True),
}  # fmt: skip
"""Settings by kind of model; others have `LORA`."""
USUAL = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), (3, 2.0))
ADAPTED = {
    "gemma3": dict.fromkeys(("q_proj", "v_proj", "o_proj", "up_proj", "down_proj"), (3, 2.0)),
    "qwen3moe": {"q_proj": (3, 2.0), "k_proj": (3, 1.0), "v_proj": (3, 2.0), "o_proj": (2, 3.0), "mlp.gate": (3, 2.0)},
    "qwen2-some": {"layers.3.self_attn.o_proj": (2, 3.0)} | {
        f"layers.3.{name}": (3, 2.0) for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
                                                  "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    },
    "deepseek": {"shared_experts.down_proj": (5, 6 / 5**0.5)} | dict.fromkeys(
        ("o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "gate_proj", "up_proj",
         "mlp.down_proj", "mlp.gate"), (3, 6 / 3**0.5)
    ),
    "qwen3moe-experts": {"experts.down_proj": (2, 3.0), "experts.gate_up_proj": (6, 2.0)} | dict.fromkeys(
        ("q_proj", "k_proj", "v_proj", "o_proj", "mlp.gate"), (3, 2.0)
    ),
    "gpt-oss-experts": dict.fromkeys(("q_proj", "experts.gate_up_proj", "experts.down_proj", "mlp.router"), (3, 2.0)),
    "deepseek-experts": {"experts.gate_up_proj": (6, 12 / 6**0.5)} | dict.fromkeys(
        ("gate_proj", "up_proj", "down_proj"), (3, 6 / 3**0.5)
    ),
}  # fmt: skip
"""By the end of its name, rank and scale of each adapted layer of these models."""
EXCLUDED = {"deepseek": "model.layers.1.self_attn.o_proj"}


def settings(kind: str) -> LoraConfig:
    return SETTINGS.get(kind, LORA)


def settings_of(case: Case) -> LoraConfig:
    """The settings of a case's kind, with its way of computing."""
    return settings(case.kind).model_copy(update={"refit": case.lora.refit})


@cache
def adapted(kind: str) -> dict[str, tuple[int, float]]:
    """Rank and scale of each adapted layer of a model, by transformers' names."""
    return {
        name: next(value for end, value in ends.items() if f".{name}".endswith(f".{end}"))
        for ends in (ADAPTED.get(kind, USUAL),)
        for name in (key.removesuffix(".weight") for key in hf_model(kind).state_dict())
        if any(f".{name}".endswith(f".{end}") for end in ends) and name != EXCLUDED.get(kind)
    }


@cache
def adapters_of(kind: str) -> dict[str, Tensor]:
    """Random A and B of each adapted layer of a model, by transformers' names; both count."""
    generator, found = torch.Generator().manual_seed(5), dict[str, Tensor]()
    weights = hf_model(kind).state_dict()
    for name, (rank, _) in adapted(kind).items():
        *experts, outputs, inputs = weights[weight_name(name)].shape
        if kind.startswith("gpt-oss") and experts:
            outputs, inputs = inputs, outputs
        found[f"{name}.lora_a"] = 0.1 * torch.randn(*experts, rank, inputs, generator=generator)
        found[f"{name}.lora_b"] = 0.1 * torch.randn(*experts, outputs, rank, generator=generator)
    return found


WHOLE = {
    "llama-whole": ("model.embed_tokens.weight", "lm_head.weight"),
    "llama-tied-whole": ("model.embed_tokens.weight",),
}
"""By kind of model, the parameters that are trained whole beside adapters."""


@cache
def whole_of(kind: str) -> dict[str, Tensor]:
    """Values of these parameters that are not the base's."""
    generator, weights = torch.Generator().manual_seed(7), hf_model(kind).state_dict()
    return {
        name: weights[name] + 0.05 * torch.randn(weights[name].shape, generator=generator)
        for name in WHOLE.get(kind, ())
    }


def weight_name(module: str) -> str:
    return module if ".experts." in module else f"{module}.weight"


def merge(kind: str, base: dict[str, Tensor], lora: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a model with adapters."""
    found = dict(base)
    for name, (_, scale) in adapted(kind).items():
        update = scale * lora[f"{name}.lora_b"] @ lora[f"{name}.lora_a"]
        update = update.mT if kind.startswith("gpt-oss") and update.dim() > 2 else update
        found[weight_name(name)] = base[weight_name(name)] + update
    found |= {name: lora[name] for name in WHOLE.get(kind, ())}
    return found


class Expected:
    """Two steps of torch's AdamW on A and B, through transformers' model on the merged weights."""

    def __init__(self, kind: str) -> None:
        model, optim = hf_model(kind), Optim()
        tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
        self.base = {name: value for name, value in model.state_dict().items() if name not in tied}
        trained = adapters_of(kind) | whole_of(kind)
        lora = {name: value.clone().requires_grad_() for name, value in trained.items()}
        adam = torch.optim.AdamW(
            lora.values(), lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps,
            weight_decay=optim.weight_decay,
        )  # fmt: skip
        self.norms, self.losses = list[float](), list[float]()
        for step in range(2):
            adam.zero_grad()
            weights = merge(kind, self.base, lora)
            logprobs = reference_logprobs(model, weights, make_batch())
            if step == 0:
                self.logprobs = {key: value[0].detach() for key, value in logprobs.items()}
                self.merged = {name: value.detach().clone() for name, value in weights.items()}
            loss = torch.zeros(())
            for key, columns in logprobs.items():
                loss = loss + token_loss(*columns, torch.tensor(advantage(*key)), torch.tensor(WEIGHT))
            loss.backward()
            self.losses.append(float(loss.detach()))
            if step == 0:
                self.grads = {name: value.grad.clone() for name, value in lora.items() if value.grad is not None}
            self.norms.append(float(torch.nn.utils.clip_grad_norm_(lora.values(), optim.clip)))
            adam.step()
        self.lora = {name: value.detach() for name, value in lora.items()}
        plain = reference_logprobs(model, self.base, make_batch())
        self.base_logprobs = {key: value[0].detach() for key, value in plain.items()}


@cache
def expected(kind: str) -> Expected:
    return Expected(kind)


NAMES = {
    "q_proj": "linear_qkv", "k_proj": "linear_qkv", "v_proj": "linear_qkv", "o_proj": "linear_proj",
    "q_a_proj": "linear_q_down_proj", "q_b_proj": "linear_q_up_proj", "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_b_proj": "linear_kv_up_proj", "gate_proj": "linear_fc1", "up_proj": "linear_fc1", "down_proj": "linear_fc2",
    "gate": "router",
}  # fmt: skip
"""Transformers' layers in the order of Megatron's, and Megatron's names."""


def megatron_adapters(kind: str, lora: dict[str, Tensor]) -> dict[str, Tensor]:
    """Adapters (or their gradients) by Megatron's names: A of each part of a fused layer below the one before, B in the
    rows of the weight, and 0 in those of parts without an adapter."""
    weights, found = hf_model(kind).state_dict(), dict[str, Tensor]()
    ranks = {
        name.rpartition(".")[0]: value.shape[1]
        for name, value in lora.items()
        if name.endswith("lora_b") and ".experts." not in name
    }
    columns = dict[str, Tensor]()
    for name, value in weights.items():
        module = name.removesuffix(".weight")
        siblings = [other for other in ranks if other.rpartition(".")[0] == module.rpartition(".")[0]]
        rank = next((ranks[n] for n in siblings if n == module or NAMES[_leaf(n)] == NAMES.get(_leaf(module))), None)
        if rank is not None and value.dim() == 2 and name.endswith(".weight"):
            b = f"{module}.lora_b"
            columns[name] = lora[b] if b in lora else value.new_zeros(value.shape[0], rank)
    rows = megatron_weights(kind, weights | columns)
    for leaf, layer_name in NAMES.items():
        for name in [name for name in lora if name.endswith(f".{leaf}.lora_a") and ".experts." not in name]:
            parent = name.rsplit(".", 2)[0].replace("model.layers", "decoder.layers")
            layer = f"{parent.replace('self_attn', 'self_attention')}.{layer_name}"
            held = found.get(f"{layer}.lora_a", lora[name][:0])
            found[f"{layer}.lora_a"] = torch.cat([held, lora[name]])
            found[f"{layer}.lora_b"] = rows[f"{layer}.weight"]
    for name, value in lora.items():
        for expert, part in enumerate(value) if ".experts." in name else ():
            parent, _, leaf = name.replace("model.layers", "decoder.layers").partition("experts.")
            layer = {"gate_up_proj": "linear_fc1", "down_proj": "linear_fc2"}[leaf.partition(".")[0]]
            found[f"{parent}experts.local_experts.{expert}.{layer}.{leaf.partition('.')[2]}"] = part
    return found


def _leaf(module: str) -> str:
    return module.rpartition(".")[2]


def adapted_worker(rank: int, case: Case, model: Model) -> Any:
    """A worker on the model's weights, with the adapters of `adapters_of`."""
    whole = adapters_of(case.kind)
    if isinstance(model, dict):
        worker = make_worker(rank, replace(case, lora=settings_of(case)), model | megatron_adapters(case.kind, whole))
    else:
        worker = make_worker(rank, replace(case, lora=settings_of(case)), model)
        named = worker.saved()
        assert named.keys() == whole.keys() | whole_of(case.kind).keys()
        worker.take_whole(whole_of(case.kind))
        for name, value in named.items():
            if name not in whole:
                continue
            wanted = whole[name]
            shape = worker.layouts().modules.params.get(name.removesuffix(".lora_b"), ()) or None
            if shape is not None and len(shape.shape) > 3:  # gate and up are apart there
                wanted = wanted.view(*shape.shape[:-1], wanted.shape[-1])
            set_part(worker.layouts(), rank, name, value, wanted)
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
    assert worker._reference == {}, "the reference policy is the base, without a second copy"
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
        worker = make_worker(rank, replace(after, lora=settings_of(case)), model)
        worker.load_saved(saved)
        load_batch(worker, rank, after, batch)
    out["results"].append(worker.train_minibatch(0, Loss(), Optim().lr))
    out["params"] = list(pieces(worker, "data"))
    out["asleep"] = (worker.sleep(), sum(value.untyped_storage().nbytes() for value in memory_of(worker)))
    worker.wake()
    return out


def run_family(
    rank: int, case: Case, directory: Path, facts: ModelFacts, batch: Batch, saved: Path, lora: LoraConfig = LORA
) -> dict[str, Any]:
    """Three steps with adapters of a family without a file, which are saved, and log-probs of the policy before the
    last one and behind it, the latter also after a load."""
    worker = make_worker(rank, replace(case, lora=lora), directory, own_facts=facts)
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
    worker = make_worker(rank, replace(case, lora=lora), directory, own_facts=facts)
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


def policy_of(run: Path, base: Path, lora: LoraConfig = LORA) -> Path:
    """The directory of a run's checkpoint, which is to be written; the run's manifest is there."""
    policy = run / "checkpoints" / "step_1" / "policy"
    policy.mkdir(parents=True)
    manifest = {
        "model": {"directory": str(base), "fingerprint": model_fingerprint(base)},
        "config": {f"training.lora.{key}": {"value": value} for key, value in lora.model_dump(mode="json").items()},
    }
    (run / "manifest.json").write_text(json.dumps(manifest))
    return policy


def run_sent(rank: int, case: Case, model: Model) -> tuple[Any, Any, dict[str, Tensor]]:
    """What a refit of adapters alone reads of a rank: the adapters of all ranks, their layouts, and its parts."""
    source = AdapterSource(adapted_worker(rank, case, model))
    rows = source.rows()
    return rows, source.layouts(), {name: value.clone() for name, value in source.parameters().items()}


def run_started(rank: int, case: Case, model: Model, batch: Batch, adapter: Path) -> dict[tuple[int, int], Tensor]:
    """Log-probs of a policy that starts from an adapter of PEFT, and is trained for a step afterwards."""
    worker = make_worker(rank, case, model)
    worker.load_adapter(adapter)
    shard = load_batch(worker, rank, case, batch)
    worker.add_logprobs("old_logprobs")
    logprobs = column_by_rollout(worker, shard, "old_logprobs")
    before = [value.clone() for _, value in worker.trained()]
    worker.train_minibatch(0, Loss(), 1e-12)  # from the optimizer's own float32 weights
    assert all(close(value, old, 1e-6) for (_, value), old in zip(worker.trained(), before, strict=True))
    return logprobs


def train_with_dropout(
    rank: int, case: Case, model: Model, batch: Batch, saved: Path
) -> tuple[list[Any], list[Any], dict[tuple[int, int], Tensor]]:
    """Three steps with dropout; the results, those of the last two after a save and a load, and the log-probs."""
    lora = settings(case.kind).model_copy(update={"refit": "adapters", "dropout": case.lora.dropout})
    worker = make_worker(rank, replace(case, lora=lora), model)
    shard = load_batch(worker, rank, case, batch)
    worker.add_logprobs("old_logprobs")
    logprobs = column_by_rollout(worker, shard, "old_logprobs")
    results = [worker.train_minibatch(0, Loss(), Optim().lr)]
    worker.save_begin(saved)
    worker.save_finish()
    results += [worker.train_minibatch(0, Loss(), Optim().lr) for _ in range(2)]
    worker = make_worker(rank, replace(case, lora=lora), model)
    worker.load_saved(saved)
    load_batch(worker, rank, case, batch)
    return results, [worker.train_minibatch(0, Loss(), Optim().lr) for _ in range(2)], logprobs


def train_in_turns(rank: int, case: Case, model: Model, batch: Batch, rates: list[float]) -> list[dict[str, Any]]:
    """Three steps of one adapter per learning rate, in turns over one base: results, parameters and merged weights."""
    worker = adapted_worker(rank, case, model)
    if len(rates) > 1:
        worker.hold_adapters(len(rates))
    waiting = [
        sum({id(value): value.nbytes for value in states.values()}.values()) for states in worker._waiting.values()
    ]
    weights = sum(value.numel() for _, value in worker.trained())
    state_bytes = 12 if case.backend == "dtensor" or case.dtype == "float32" else 14
    assert all(size <= 1.2 * state_bytes * weights for size in waiting), (waiting, weights)
    results: list[list[Any]] = [[] for _ in rates]
    for _ in range(3):
        for number, rate in enumerate(rates):
            worker.use_adapter(number)
            load_batch(worker, rank, case, batch)
            results[number].append(worker.train_minibatch(0, Loss(), rate))
    outcomes = []
    for number in range(len(rates)):
        worker.use_adapter(number)
        weights = {name: value.clone() for name, value in worker.parameters().items()}
        outcome = {"results": results[number], "params": list(pieces(worker, "data")), "weights": weights}
        outcomes.append(outcome | {"waiting": sum(waiting)})
    return outcomes
