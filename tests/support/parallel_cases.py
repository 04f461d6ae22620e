"""What runs inside the pool's processes, whatever backend trains: a policy on the reference's weights and batch, two
optimizer steps, its pieces back."""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from rlctl.backends.base import Dtype, PolicySpec
from rlctl.backends.batching.batch import (
    LogprobColumn,
    LogprobStats,
    LossOutput,
    MicroBatchLoss,
    MinibatchResult,
    TokenBatch,
    WeightedSequence,
)
from rlctl.backends.batching.packing import BatchPlan, plan_batch
from rlctl.backends.dtensor.tensor_parallel import local_part
from rlctl.backends.dtensor.worker import DTensorWorker
from rlctl.backends.megatron.lora import core_of
from rlctl.backends.megatron.optimizer import inner_optimizers
from rlctl.backends.megatron.worker import MegatronWorker
from rlctl.backends.messages import Truncation
from rlctl.config.parallel import ParallelSpec
from rlctl.data.rollouts import RolloutColumns
from rlctl.methods.rl.grpo import Grpo
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.models.facts import ModelFacts
from rlctl.settings.training import LoraConfig, OptimizerConfig, QuantizationConfig
from rlctl.training.run_loss import RunLoss
from support.pool import Published
from support.reference_policy import Optim, advantage, facts, prompt_tokens, reference_weights, token_loss

WEIGHT = 0.01
WORKERS: dict[str, Any] = {"megatron": MegatronWorker, "dtensor": DTensorWorker}
Model = dict[str, Tensor] | Path | None
"""The reference's weights by Megatron's names, or a directory with them."""
Batch = dict[int, RolloutColumns]


@dataclass(frozen=True)
class Case:
    """One cell of the parity matrix."""

    kind: str = "llama"
    parallel: ParallelSpec = field(default_factory=ParallelSpec)
    dtype: Dtype = "float32"
    packing: bool = True
    dynamic: bool = False
    share_prompts: bool = True
    whole_groups: bool = False
    micro_batch_tokens: int = 64
    temperature: float = 1.0
    truncation: Truncation | None = None
    chunk: int = 1024
    recompute: str = "none"
    optimizer_offload: bool = False
    reference_offload: bool = False
    freeze_router: bool = False
    replay: bool = False
    lora: LoraConfig = field(default_factory=LoraConfig)
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    optimizer: Literal["adamw", "muon"] = "adamw"
    megatron: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    backend: str = "megatron"


def of_modules(kind: str = "llama", recompute: str = "none", **sizes: int) -> Case:
    """A case on transformers' modules."""
    return Case(kind, ParallelSpec(**sizes), recompute=recompute, backend="dtensor")


def of_family(facts: ModelFacts, parallel: ParallelSpec, share_prompts: bool = False, **more: Any) -> Case:
    """A case on the modules of a family, whose rollouts are packed where they can be."""
    own = {"packing": False, "dynamic": True} if facts.unpacked else {}
    return Case(parallel=parallel, share_prompts=share_prompts, micro_batch_tokens=48, backend="dtensor", **own, **more)


def model_of(case: Case, published: Published) -> Model:
    """The reference's model as the backend of a case takes it."""
    return published(case.kind) if case.backend == "dtensor" else reference_weights(case.kind)


@dataclass
class Piece:
    """One rank's part of the outcome."""

    results: list[MinibatchResult | None]
    logprobs: dict[tuple[int, int], Tensor]
    grads: list[tuple[str, Tensor, int, int, int | None]]
    """name, local tensor, part, parts, split axis (None: whole); of transformers' modules whole, on rank 0 alone"""
    params: list[tuple[str, Tensor, int, int, int | None]]
    tokens: int = 0
    """Tokens of the rows that this rank computed, padding not counted."""
    held: int = 0
    """Elements of parameters on this rank."""


class Loss:
    """`reference.token_loss` as a method's loss."""

    def __call__(self, batch: TokenBatch) -> LossOutput:
        loss = token_loss(
            batch.logprobs_R, batch.entropy_R, batch.rollout_logprobs_R, batch.advantages_R, batch.token_weights_R
        )
        sums = {"tokens": torch.tensor(float(len(batch.logprobs_R))), "entropy": batch.entropy_R.sum()}
        return LossOutput(loss, sums, {"top": batch.logprobs_R.abs().max()})


def spec_of(case: Case) -> PolicySpec:
    o = Optim()
    optimizer = OptimizerConfig(
        optimizer=case.optimizer, lr=o.lr, beta1=o.beta1, beta2=o.beta2, eps=o.eps, weight_decay=o.weight_decay,
        clip_grad=o.clip,
    )  # fmt: skip
    return PolicySpec(
        facts(case.kind),
        case.parallel,
        case.dtype,
        optimizer=optimizer,
        temperature=case.temperature,
        truncation=case.truncation,
        threads=1,
        logprob_chunk_tokens=case.chunk,
        recompute=case.recompute,
        optimizer_offload=case.optimizer_offload,
        reference_offload=case.reference_offload,
        freeze_router=case.freeze_router,
        router_replay=case.replay,
        lora=case.lora,
        quantization=case.quantization,
        megatron=case.megatron,
        ddp=case.ddp,  # type: ignore[arg-type]
    )


def rows_of(batch: Batch) -> list[WeightedSequence]:
    return [
        WeightedSequence(
            group, row, prompt_tokens(c), c.slice(row).stop - c.slice(row).start, advantage(group, row), WEIGHT
        )
        for group, c in batch.items()
        for row in range(c.rollouts)
    ]


def plan_of(case: Case, batch: Batch, rows: list[WeightedSequence] | None = None) -> BatchPlan:
    """The plan of `rows`, or of all rollouts of the batch."""
    return plan_batch(
        [rows_of(batch) if rows is None else rows],
        batch,
        dp=case.parallel.dp,
        micro_batch_tokens=case.micro_batch_tokens,
        packing=case.packing,
        dynamic=case.dynamic,
        share_prompts=case.share_prompts,
        whole_groups=case.whole_groups,
        multiple=case.parallel.row_multiple,
        micro_batch_multiple=case.parallel.micro_batch_multiple,
    )


def make_worker(
    rank: int, case: Case, model: Model, *, load: bool = True, own_facts: ModelFacts | None = None, **more: Any
) -> Any:
    """A worker in the pool's process group, on a model; `own_facts`: where they are no case's, `more`: of the spec."""
    directory = model if isinstance(model, Path) else None
    spec = replace(spec_of(case), facts=own_facts or facts(case.kind), model_dir=directory, **more)
    worker = WORKERS[case.backend](rank, case.parallel.world_size, "127.0.0.1", spec)
    worker.prepare()
    worker.build()
    if load and directory is not None:
        worker.load_model(directory)
    elif load and model is not None:
        fill(worker, model)
    return worker


def load_batch(worker: Any, rank: int, case: Case, batch: Batch, rows: list[WeightedSequence] | None = None) -> Any:
    """Load this rank's part of the batch (or of `rows` of it), and return that part."""
    shard = plan_of(case, batch, rows).shards[case.parallel.data_rank(rank)]
    worker.load_batch(shard, list)
    return shard


def whole(tensor: Tensor) -> Tensor:
    """In transformers' shape: gate and up of experts are apart in the worker."""
    found = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
    return found.flatten(1, 2) if found.dim() == 4 else found


def wholes(worker: Any, what: str) -> dict[str, Tensor]:
    """Parameters of transformers' modules (`data`, with stored buffers) or gradients (`grad`), whole. Collective."""
    worker.parameters()
    inner = worker.model.inner
    named = dict(inner.named_parameters())
    if what == "grad":
        return {name: whole(value.grad) for name, value in named.items() if value.grad is not None}
    buffers = {name: inner.get_buffer(name) for name in worker._buffers}
    return {name: whole(value) for name, value in (named | buffers).items()}


def memory_of(worker: Any) -> list[Tensor]:
    """This rank's part of the model's parameters and of the reference, where they are stored."""
    held = [local_part(value) for model in worker.models for value in model.parameters()]
    return [*held, *(worker._reference or {}).values()]


def run_gradient_norm(rank: int, gradients: list[torch.Tensor]) -> float:
    """Megatron's norm of gradients of whole parameters."""
    from megatron.core.optimizer import clip_grads

    return float(clip_grads.l2_norm_impl(0, None, [gradients], False)[0])


def run_meeting(rank: int, case: Case) -> tuple[bool, bool]:
    """Whether strangers reach the store at which the ranks meet, before and after the worker of a run has started."""
    torch.distributed.destroy_process_group()
    worker = MegatronWorker(rank, case.parallel.world_size, "127.0.0.1", spec_of(case))
    port = worker.open_store()
    before = answers(port)
    worker.setup(port)
    return before, answers(port)


def answers(port: int) -> bool:
    with contextlib.suppress(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5).close()
        return True
    return False


def run_case(
    rank: int,
    case: Case,
    model: Model,
    batch: Batch,
    loss: MicroBatchLoss | None = None,
    own_facts: ModelFacts | None = None,
    rows: list[WeightedSequence] | None = None,
) -> Piece:
    loss = loss or Loss()
    worker = make_worker(rank, case, model, own_facts=own_facts)
    shard = load_batch(worker, rank, case, batch, rows)
    worker.add_logprobs("old_logprobs")
    logprobs = column_by_rollout(worker, shard, "old_logprobs")
    results, grads = [], []
    for step in range(2):
        results.append(worker.train_minibatch(0, loss, Optim().lr))
        if step == 0:
            gather_gradients(worker)
            grads = list(pieces(worker, "grad"))
    held = sum(value.numel() for value in worker.parameters().values())
    return Piece(results, logprobs, grads, list(pieces(worker, "data")), tokens_of(worker), held)


def run_without(
    rank: int, case: Case, weights: dict[str, Tensor], batch: Batch, advantages: dict[int, float]
) -> list[Piece]:
    """Two steps under GRPO's loss on rollouts with the advantages of their groups: on all of them, and on those whose
    advantage is not 0."""
    loss = RunLoss(Grpo(RlConfig()))
    rows = [row._replace(advantage=advantages[row.position]) for row in rows_of(batch)]
    found = []
    for own in (rows, [row for row in rows if row.advantage]):
        worker = make_worker(rank, case, weights)
        load_batch(worker, rank, case, batch, own)
        results = [worker.train_minibatch(0, loss, Optim().lr)]
        gather_gradients(worker)
        grads = list(pieces(worker, "grad"))
        results.append(worker.train_minibatch(0, loss, Optim().lr))
        found.append(Piece(results, {}, grads, list(pieces(worker, "data")), tokens_of(worker)))
    return found


def tokens_of(worker: Any) -> int:
    """Tokens of the loaded rows, shared prompts counted once, padding not counted."""
    return sum(row.tokens for minibatch in worker._rows for row in minibatch)


def gather_gradients(worker: Any) -> None:
    """The whole sum on every rank: Megatron's optimizer leaves each data-parallel rank its own part of it."""
    for chunk in getattr(worker, "chunks", ()):
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            group = buffer.data_parallel_group
            for bucket in buffer.buckets if group.size() > 1 else ():
                own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                torch.distributed.all_gather_into_tensor(bucket.grad_data, own, group=group)


def run_checkpoint(
    rank: int,
    before: Case,
    after: Case,
    model: Model,
    batch: Batch,
    directory: Path,
    by_megatron: bool = False,
    own_facts: ModelFacts | None = None,
) -> tuple[list[Any], list[Any], list[Any], list[Any], list[Any]]:
    """(results, params) of the second step: uninterrupted, and after save, rebuild as `after`, load; and what a worker
    of transformers' modules holds that was given the checkpoint for a model. `by_megatron`: the optimizer's part is
    saved as Megatron does it, whole tensors with all hyperparameters."""
    worker = make_worker(rank, before, model, own_facts=own_facts)
    load_batch(worker, rank, before, batch)
    worker.train_minibatch(0, Loss(), Optim().lr)
    if by_megatron:
        save_by_megatron(worker, directory)
        straight = worker.train_minibatch(0, Loss(), Optim().lr)
    else:
        worker.save_begin(directory)
        straight = worker.train_minibatch(0, Loss(), Optim().lr)  # while the snapshot is written
        assert worker.damaged_files(directory, worker.save_finish()) == []
    kept, published = list(pieces(worker, "data")), list[Any]()
    worker = make_worker(rank, after, model, load=False, own_facts=own_facts)
    if after.backend == "dtensor":
        worker.load_model(directory)
        published = list(pieces(worker, "data"))
    worker.load_saved(directory)
    load_batch(worker, rank, after, batch)
    resumed = worker.train_minibatch(0, Loss(), Optim().lr)
    return [straight], kept, [resumed], list(pieces(worker, "data")), published


def save_by_megatron(worker: MegatronWorker, directory: Path) -> None:
    from megatron.core import dist_checkpointing, parallel_state

    write_without_forks()
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "chained_optim_avoid_prefix": True,
    }
    (core,) = worker._cores()
    model = core.sharded_state_dict(metadata=metadata)
    optimizer = worker.optimizer.sharded_state_dict(model, is_loading=False, metadata=metadata)
    dist_checkpointing.save({"model": model, "optimizer": optimizer}, str(directory))


def write_without_forks() -> None:
    """Let Megatron's own saves write in this process: forks after communication and autograd threads can deadlock."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(_write_here)


def _write_here(transforms: Any, use_msc: bool, rank: int, buckets: Any, results: Any) -> None:
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    found = dict[int, Any]()
    for index, bucket in enumerate(buckets):
        done, count = queue.Queue(), queue.Queue()
        count.put(index)
        FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, done, count, True, use_msc=use_msc)
        index, found[index] = done.get()
    results.put(found)


def run_checkpoint_of_no_step(
    rank: int, case: Case, weights: dict[str, Tensor], batch: Batch, directory: Path
) -> list[tuple[Any, list[Any]]]:
    """Result and params of the first step: without a save, with one before it, and from that."""

    def first_step(worker: MegatronWorker) -> tuple[Any, list[Any]]:
        load_batch(worker, rank, case, batch)
        return worker.train_minibatch(0, Loss(), Optim().lr), list(pieces(worker, "data"))

    found = [first_step(make_worker(rank, case, weights))]
    worker = make_worker(rank, case, weights)
    worker.save_begin(directory)
    worker.save_finish()
    found.append(first_step(worker))
    worker = make_worker(rank, case, None)
    worker.load_saved(directory)
    return [*found, first_step(worker)]


def column_by_rollout(worker: Any, shard: Any, column: str) -> dict[tuple[int, int], Tensor]:
    out = {}
    for micro, row in zip(shard.minibatches[0], worker._rows[0], strict=True):
        for index, rollout in enumerate(micro):
            if column in row.columns_R:
                out[rollout.position, rollout.sample] = row.columns_R[column][row.columns_R["rollout"] == index]
    return out


def fill(worker: MegatronWorker, weights: dict[str, Tensor]) -> None:
    for name, tensor, part, parts, axis in pieces(worker, "live"):
        if ".lora_" in name and name not in weights:
            continue  # as they begin: a policy equal to its base
        tensor.copy_(take(weights[name], name, part, parts, axis))
    worker.weights_changed()


def take(whole: Tensor, name: str, part: int, parts: int, axis: int | None) -> Tensor:
    if axis is None:
        return whole
    if "linear_fc1" in name and "lora_a" not in name:  # gate and up are split each
        return torch.cat([half.chunk(parts)[part] for half in whole.chunk(2)])
    return whole.chunk(parts, axis)[part]


def join(parts: list[Tensor], name: str, axis: int | None) -> Tensor:
    if axis is None or len(parts) == 1:
        return parts[0]
    if "linear_fc1" in name:
        halves = [part.chunk(2) for part in parts]
        return torch.cat([*(h[0] for h in halves), *(h[1] for h in halves)])
    return torch.cat(parts, axis)


def pieces(worker: Any, what: str) -> Iterator[tuple[str, Tensor, int, int, int | None]]:
    """(global name, tensor, part, parts, split axis) of this rank's parameters, gradients, or live storage."""
    if isinstance(worker, DTensorWorker):
        found = wholes(worker, what)
        yield from ((name, value, 0, 1, None) for name, value in found.items() if worker.rank == 0)
        return
    from megatron.core import parallel_state as ps

    worker._gather_parameters()
    for chunk in worker.chunks:
        model = core_of(chunk)
        named = list(model.named_parameters())
        if what != "grad":
            named += [(n, b) for n, b in model.named_buffers() if n.endswith("expert_bias")]
        for name, param in named:
            if what == "grad" and not param.requires_grad:
                continue
            expert = "local_experts" in name
            split = getattr(param, "tensor_model_parallel", False)
            size = ps.get_expert_tensor_parallel_world_size() if expert else ps.get_tensor_model_parallel_world_size()
            rank = ps.get_expert_tensor_parallel_rank() if expert else ps.get_tensor_model_parallel_rank()
            value = param.main_grad if what == "grad" else param.data
            value = value if what == "live" else value.detach().clone()
            name = global_name(model, name)
            # The second copy of tied embeddings on the last pipeline stage
            name = (
                name
                if not (name == "output_layer.weight" and model.share_embeddings_and_output_weights)
                else "embedding.word_embeddings.weight"
            )
            yield (
                name,
                value,
                rank if split else 0,
                size if split else 1,
                param.partition_dim if split and size > 1 else None,
            )


def global_name(model: Any, name: str) -> str:
    """Layer numbers offset by pipeline stage, expert numbers by expert rank."""
    from megatron.core import parallel_state as ps

    parts = name.removeprefix("module.").split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(model.decoder.layers[int(parts[2])].layer_number - 1)
    if "local_experts" in parts:
        at = parts.index("local_experts") + 1
        local = model.config.num_moe_experts // model.config.expert_model_parallel_size
        parts[at] = str(int(parts[at]) + local * ps.get_expert_model_parallel_rank())
    return ".".join(parts)


def assemble(ranks: list[list[tuple[str, Tensor, int, int, int | None]]]) -> tuple[dict[str, Tensor], float]:
    """Whole tensors from all ranks' pieces, and the largest difference between replicas."""
    shards: dict[str, tuple[list[Tensor | None], int | None]] = {}
    spread = 0.0
    for rank in ranks:
        for name, tensor, part, parts, axis in rank:
            slots = shards.setdefault(name, ([None] * parts, axis))[0]
            if slots[part] is not None:
                spread = max(spread, (slots[part] - tensor).abs().max().item())  # type: ignore[operator]
            slots[part] = tensor
    whole = {name: join([p for p in parts if p is not None], name, axis) for name, (parts, axis) in shards.items()}
    return whole, spread


def run_load_hf(rank: int, case: Case, directory: Path) -> list[tuple[str, Tensor, int, int, int | None]]:
    worker = make_worker(rank, case, None)
    worker.load_model(directory)
    return list(pieces(worker, "data"))


def run_held(rank: int, case: Case, directory: Path) -> dict[str, Tensor]:
    """What a refit would read right after loading, before any forward pass."""
    worker = make_worker(rank, case, None)
    worker.load_model(directory)
    return {name: value.clone() for name, value in worker.parameters().items()}


def log_probs(worker: Any, column: LogprobColumn) -> LogprobStats | None:
    """Adds a column of log-probs, and compares it with the engine's."""
    worker.add_logprobs(column)
    return worker.logprob_difference(column)


def run_logprobs(rank: int, case: Case, weights: dict[str, Tensor], batches: list[Batch]) -> list[dict]:
    """Log-probs of each batch under the same weights."""
    worker = make_worker(rank, case, weights)
    found = []
    for batch in batches:
        shard = load_batch(worker, rank, case, batch)
        worker.add_logprobs("old_logprobs")
        found.append(column_by_rollout(worker, shard, "old_logprobs"))
    return found


def run_squares(rank: int, case: Case, weights: dict[str, Tensor], batch: Batch) -> list[Piece]:
    """The case with units attended in one masked square each, as on GPUs, and a completion at a time."""
    from rlctl.backends.batching import row_attention

    usual, found = row_attention.takes_squares, []
    try:
        for squares in (True, False):
            row_attention.takes_squares = lambda device, squares=squares: squares
            found.append(run_case(rank, case, weights, batch))
    finally:
        row_attention.takes_squares = usual
    return found


class BrokenLoss(Loss):
    """A loss whose gradient is not a number."""

    def __call__(self, batch: TokenBatch) -> LossOutput:
        out = super().__call__(batch)
        return LossOutput(out.loss * float("nan"), out.sums, out.maxima)


def run_broken(rank: int, case: Case, model: Model, batch: Batch) -> tuple:
    """(results of a broken step and the one after it, and without it), whether the broken one changed nothing, and the
    parameters that are not finite before and after one of them is spoilt."""
    results, same = [], False
    for losses in ([BrokenLoss(), Loss()], [Loss()]):
        worker = make_worker(rank, case, model)
        load_batch(worker, rank, case, batch)
        before = {name: value.clone() for name, value in worker.parameters().items()}
        for number, loss in enumerate(losses):
            results.append(worker.train_minibatch(0, loss, Optim().lr))
            if number == 0 and len(losses) == 2:
                same = all(torch.equal(value, before[name]) for name, value in worker.parameters().items())
    odd = [worker.parameters_not_finite()]
    next(iter(worker.parameters().values()))[-1] = torch.inf
    return results, same, [*odd, worker.parameters_not_finite()]


def run_reference_policy(rank: int, case: Case, weights: dict[str, Tensor], batch: Batch) -> tuple:
    """Log-probs before training, of the reference after a step, of the policy after it, and whether refit memory
    stayed put."""
    worker = make_worker(rank, case, weights)
    worker.hold_reference()
    shard = load_batch(worker, rank, case, batch)
    worker.add_logprobs("old_logprobs")
    before = column_by_rollout(worker, shard, "old_logprobs")
    places = {name: value.data_ptr() for name, value in worker.parameters().items()}
    worker.train_minibatch(0, Loss(), 1e-2)
    stats = [log_probs(worker, "reference_logprobs"), log_probs(worker, "old_logprobs")]
    moved = {name for name, value in worker.parameters().items() if value.data_ptr() != places[name]}
    reference, after = (column_by_rollout(worker, shard, c) for c in ("reference_logprobs", "old_logprobs"))
    return before, reference, after, stats, moved


def run_built_configs(rank: int, spec: PolicySpec) -> tuple[Any, Any, Any]:
    """Megatron's own configuration objects of a worker: transformer, data parallel, optimizer."""
    worker = MegatronWorker(rank, spec.parallel.world_size, "127.0.0.1", spec)
    worker.build()
    transformer = {
        key: value for key, value in vars(worker.config).items() if isinstance(value, str | int | float | None)
    }
    return transformer, worker.chunks[0].ddp_config, worker.optimizer.config


def run_asleep(rank: int, case: Case, model: Model, batch: Batch) -> tuple:
    """(results and parameters of two steps without a sleep between them and with one), bytes freed, bytes left, and
    whether the memory that refits read stayed where it was."""
    found, freed, left, moved = [], 0, 0, False
    for sleeps in (False, True):
        worker = make_worker(rank, case, model)
        worker.hold_reference()
        load_batch(worker, rank, case, batch)
        places = {name: value.data_ptr() for name, value in worker.parameters().items()}
        results = [worker.train_minibatch(0, Loss(), Optim().lr)]
        if sleeps:
            weights_on = {name: value.clone() for name, value in worker.parameters().items()}
            part = worker.sleep(keep_weights=True)
            assert all(torch.equal(value, weights_on[name]) for name, value in worker.parameters().items())
            freed = worker.sleep()
            assert 0 < part < freed
            left = sum(value.untyped_storage().nbytes() for value in memory_of(worker))
            worker.wake()
            if case.optimizer_offload and case.backend == "dtensor":
                assert not any(state.untyped_storage().nbytes() for state in worker._states())
        results.append(worker.train_minibatch(0, Loss(), Optim().lr))
        results.append(log_probs(worker, "reference_logprobs"))
        if not sleeps and not case.lora.rank:
            moved = any(value.data_ptr() != places[name] for name, value in worker.parameters().items())
        found.append((results, {name: value.clone() for name, value in worker.parameters().items()}))
    return found, freed, left, moved


class Allocations:
    """While entered, counts the bytes that torch's allocator hands out: `peak` is the most at one time. Those that
    collectives over tensors of other ranks ask for are in `gathered`."""

    def __enter__(self) -> Allocations:
        self.gathered, self._usual = 0, {name: getattr(torch.distributed, name) for name in ("all_gather", "gather")}
        for name, function in self._usual.items():
            setattr(torch.distributed, name, self._counting(function))
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self

    def _counting(self, function: Any) -> Any:
        def gather(*args: Any, **kwargs: Any) -> Any:
            tensors = [one for one in args if isinstance(one, list)] + list(kwargs.values())
            self.gathered += sum(one.nbytes for own in tensors if isinstance(own, list) for one in own)
            return function(*args, **kwargs)

        return gather

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        for name, function in self._usual.items():
            setattr(torch.distributed, name, function)
        results: Any = self._profile.profiler.kineto_results  # type: ignore[union-attr]
        changes = [event for event in results.events() if event.name() == "[memory]"]
        running = itertools.accumulate(e.nbytes() for e in sorted(changes, key=lambda e: e.start_ns()))
        self.peak = max(running, default=0)


def run_checkpoint_files(
    rank: int, case: Case, weights: dict[str, Tensor], batch: Batch, directory: Path
) -> tuple[list[int], list[Any], list[Any]]:
    """Bytes that the rank writes in each of two saves, and its parameters at the second one and after loading it."""
    worker = make_worker(rank, case, weights)
    load_batch(worker, rank, case, batch)
    sizes = []
    for number in range(2):
        worker.train_minibatch(0, Loss(), Optim().lr)
        place = directory / str(number)
        place.mkdir(exist_ok=True)
        worker.save_begin(place)
        assert worker.damaged_files(place, worker.save_finish()) == []
        sizes.append(sum(file.stat().st_size for file in place.glob(f"__{rank}_*.distcp")))
    kept = list(pieces(worker, "data"))
    worker = make_worker(rank, case, weights)
    worker.load_saved(directory / "1")
    return sizes, kept, list(pieces(worker, "data"))


def run_checkpoint_memory(
    rank: int, case: Case, weights: dict[str, Tensor], batch: Batch, directory: Path
) -> tuple[int, int, list[tuple[int, int]]]:
    """Bytes of the rank's weights, of its own optimizer states, and for a save and a load what each allocates at most
    and what its collectives gather."""
    worker = make_worker(rank, case, weights)
    load_batch(worker, rank, case, batch)
    worker.train_minibatch(0, Loss(), Optim().lr)
    own = sum(
        value.nbytes
        for inner in inner_optimizers(worker.optimizer)
        for param in inner.model_param_group_index_map
        for value in inner._get_main_param_and_optimizer_states(param).values()
    )
    with Allocations() as saving:
        worker.save_begin(directory)
    worker.save_finish()
    # A load makes the states where there are none, as the first step would.
    with Allocations() as loading:
        worker.load_saved(directory)
    held = sum(value.nbytes for value in worker.parameters().values())
    return held, own, [(saving.peak, saving.gathered), (loading.peak, loading.gathered)]


def run_communicators(
    rank: int, case: Case, model: Model, batch: Batch, directory: Path
) -> list[tuple[str, tuple[int, ...]]]:
    """The groups of several ranks that a step and a save use on this rank: description and ranks. NCCL makes a
    communicator for each at its first use."""
    known = distributed_c10d._world.pg_map
    every: Any = torch.distributed.group.WORLD
    before, count = set(known) - {every}, sequence_of(every)
    worker = make_worker(rank, case, model)
    load_batch(worker, rank, case, batch)
    worker.add_logprobs("old_logprobs")
    worker.train_minibatch(0, Loss(), Optim().lr)
    worker.save_begin(directory)
    worker.save_finish()
    # DTensor's cache of placements may use a group of an earlier case again. Groups of saves are gloo's on GPUs too.
    own = set(known) - before - {*getattr(worker, "_save_groups", {}).values()}
    used = [group for group in own if sequence_of(group) > (count if group is every else 0)]
    return [(group.group_desc, tuple(torch.distributed.get_process_group_ranks(group))) for group in used]


def sequence_of(group: Any) -> int:
    """The number of collectives and messages of a group so far."""
    return group._get_sequence_number_for_group() if group.size() > 1 else 0
