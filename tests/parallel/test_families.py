"""Every family, converted by the command's own code, is the same model in Megatron as in transformers: logits and
gradients in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rlctl.backends.clients import only_result
from rlctl.checkpoints.conversion.hf_megatron import hf_to_megatron
from rlctl.checkpoints.hf.hf_files import read_config
from rlctl.config.parallel import ParallelSpec
from rlctl.models.facts import ModelFacts
from rlctl.models.families import facts_from_hf_config, weights_of
from rlctl.weights.dtensor import module_layout
from rlctl.weights.megatron import MegatronWorld
from rlctl.weights.plan_execution import dtype_of, execute
from rlctl.weights.transfer_plan import receive_plan
from support.family_models import ALIKE, FAMILIES, ROUTERS, VOCAB, hf_model
from support.parallel_cases import assemble, of_family, run_case
from support.parallel_families import Cell, cotangent, make_batch, run_cell
from support.pool import Pools, slowly

Convert = Callable[[str], tuple[Path, ModelFacts]]
EXPERTS = (
    "qwen3-moe", "mixtral", "deepseek-v3", "moonlight", "gpt-oss", "glm4-moe", "olmoe", "minimax-m2", "glm4-flash",
)  # fmt: skip


@dataclass
class Expected:
    """What transformers makes of the batch."""

    logits: dict[tuple[int, int], Tensor]
    grads: dict[str, Tensor]


@cache
def expected(family: str) -> Expected:
    model, logits = hf_model(family), {}
    for group, columns in make_batch().items():
        for row in range(columns.rollouts):
            tokens = torch.from_numpy(columns.tokens_T[columns.slice(row)].astype(np.int64))
            chosen = torch.from_numpy(columns.loss_mask_T[columns.slice(row)])
            out = model(tokens[None]).logits[0]
            (out * cotangent(group, row, len(tokens)) * chosen[:, None]).sum().backward()
            logits[group, row] = out.detach()
    return Expected(logits, {name: p.grad for name, p in model.named_parameters()})


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Convert:
    """The shards of a family's Megatron checkpoint, and the facts of its published configuration."""

    @cache
    def convert(family: str) -> tuple[Path, ModelFacts]:
        directory = tmp_path_factory.mktemp(family)
        hf_model(family).save_pretrained(directory / "hf")
        hf_to_megatron(directory / "hf", directory / "megatron")
        return directory / "megatron" / "release", facts_from_hf_config(read_config(directory / "hf"))

    return convert


def module_names(facts: ModelFacts, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """Megatron's tensors of the whole model under transformers' names, and in their shapes: the layout has gate and up
    of experts apart, [E, 2, I, H]."""
    zero_centered = weights_of(facts).zero_centered_norms
    world = MegatronWorld(facts, ParallelSpec(), "local", "float32", zero_centered_norms=zero_centered)
    plan = receive_plan(world, module_layout(facts, "float32")).prove()
    found = {name: torch.zeros(s.shape, dtype=dtype_of(s.dtype)) for name, s in plan.layout.params.items()}
    for copy in plan.copies:
        if copy.source_param in whole:
            execute(copy, whole[copy.source_param], found[copy.destination_param])
    return {name: value.flatten(1, 2) if value.dim() == 4 else value for name, value in found.items()}


def check(pools: Pools, converted: Convert, cell: Cell, constant: tuple[str, ...] = ()) -> None:
    """`constant`: ends of the names of tensors that the logits do not depend on."""
    shards, facts = converted(cell.family)
    ranks = pools(cell.parallel.world_size).run(run_cell, cell, facts, shards, make_batch())
    reference = expected(cell.family)
    seen = 0
    for key, position, first, values in (entry for rank in ranks for entry in rank.logits):
        theirs = reference.logits[key][position, first : first + len(values)]
        assert ((values - theirs).abs() <= 1e-5 * theirs.abs().clamp(min=1)).all(), (key, position)
        seen += len(values)
    assert seen == VOCAB * sum(int(columns.loss_mask_T.sum()) for columns in make_batch().values())
    grads, _ = assemble([rank.grads for rank in ranks])
    grads = {
        name: value[:VOCAB] if "embedding" in name or "output_layer" in name else value for name, value in grads.items()
    }
    ours = module_names(facts, grads)
    for name, theirs in reference.grads.items():
        assert theirs.abs().max() > 1e-4 or name.endswith(constant), name
        worst = ((ours[name] - theirs).abs() / theirs.abs().clamp(min=1)).max()
        assert worst <= 1e-6, (name, worst)


@pytest.mark.parametrize("family", slowly(FAMILIES.keys(), *(FAMILIES.keys() - ALIKE)))
def test_one_process(pools: Pools, converted: Convert, family: str) -> None:
    check(pools, converted, Cell(family, ParallelSpec(), share_prompts=family in ("gemma3", "gpt-oss", "llama")))


@pytest.mark.parametrize("router", ROUTERS)
def test_routers_weigh_experts_as_transformers_does(pools: Pools, converted: Convert, router: str) -> None:
    alone = router in ("one-expert", "one-softmax", "one-of-mixtral")  # a single expert's share is 1
    check(pools, converted, Cell(router, ParallelSpec()), ("mlp.gate.weight",) if alone else ())


TP2, PP2, CP2 = ParallelSpec(tp=2), ParallelSpec(pp=2), ParallelSpec(cp=2)
EP2, TP2_EP2 = ParallelSpec(dp=2, ep=2), ParallelSpec(tp=2, ep=2, dp=2, etp=1)
PRODUCT = [
    Cell(family, replace(parallel, etp=1) if family == "gpt-oss" else parallel)
    for family in FAMILIES
    for parallel in (TP2, PP2, CP2, EP2, TP2_EP2)
    if family in EXPERTS or parallel.ep == 1
]
PRODUCT.append(Cell("qwen3-moe", replace(TP2, etp=1)))  # experts whole on every tensor-parallel rank
COVERING = {  # every family once or twice, every kind of parallelism with each kind of attention and of experts
    ("llama3", TP2), ("llama-tied", PP2), ("qwen2-yarn", TP2), ("qwen3-moe", EP2),
    ("qwen3-moe", replace(TP2, etp=1)), ("mistral-windowed", CP2),
    ("mixtral", TP2), ("deepseek-v3", TP2), ("deepseek-v3", PP2), ("moonlight", EP2), ("gemma3", TP2), ("gemma3", PP2),
    ("gpt-oss", replace(TP2, etp=1)), ("gpt-oss", replace(EP2, etp=1)), ("mixtral", TP2_EP2), ("gpt-oss", TP2_EP2),
    ("smollm3", PP2), ("phi3", TP2), ("granite", PP2), ("glm4", CP2), ("olmo3", TP2), ("minimax-m2", TP2),
    ("glm4-moe", EP2),
}  # fmt: skip


def named(cell: Cell) -> str:
    sizes = ((name, getattr(cell.parallel, name)) for name in ("tp", "pp", "cp", "ep", "etp"))
    return "-".join([cell.family, *(f"{name}{size}" for name, size in sizes if size and (size > 1 or name == "etp"))])


@pytest.mark.slow
@pytest.mark.guard
@pytest.mark.parametrize("cell", [c for c in PRODUCT if (c.family, c.parallel) in COVERING], ids=named)
def test_several_processes(pools: Pools, converted: Convert, cell: Cell) -> None:
    check(pools, converted, cell)


@pytest.mark.parametrize("parallel", [EP2, TP2_EP2], ids=["ep2", "tp2-ep2"])
def test_routers_of_divided_experts(pools: Pools, converted: Convert, parallel: ParallelSpec) -> None:
    check(pools, converted, Cell("two-of-three-groups", parallel))


@pytest.mark.slow
@pytest.mark.parametrize("cell", [c for c in PRODUCT if (c.family, c.parallel) not in COVERING], ids=named)
def test_every_family_under_every_parallelism(pools: Pools, converted: Convert, cell: Cell) -> None:
    check(pools, converted, cell)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("family", ["phi3", "glm4", "olmo3", "minimax-m2", "granite"])
def test_both_backends_take_the_same_steps(
    pools: Pools, converted: Convert, family: str, optimizer: str, tmp_path: Path
) -> None:
    """With norms over all heads and fused tensors, which tensor-parallel ranks of Megatron divide."""
    hf_model(family).save_pretrained(tmp_path)
    shards, facts = converted(family)
    results = []
    for backend, model, ranks in (("dtensor", tmp_path, 1), ("megatron", shards, 2)):
        case = replace(of_family(facts, ParallelSpec(tp=ranks), optimizer=optimizer), backend=backend)
        found = pools(ranks).run(run_case, case, model, make_batch(), None, facts)
        results.append([only_result([rank.results[step] for rank in found]) for step in range(2)])
    for ours, theirs in zip(*results, strict=True):
        assert abs(ours.loss - theirs.loss) <= 1e-6
        assert abs(ours.grad_norm - theirs.grad_norm) <= 1e-6 * max(1, theirs.grad_norm)
