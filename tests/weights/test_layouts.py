"""Weights scattered over the ranks of any engine and gathered again are the weights, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlctl.config.parallel import ParallelSpec
from rlctl.errors import ConfigError
from rlctl.models.facts import ListedTensor, ModelFacts
from rlctl.models.matrices import Role
from rlctl.weights import torch_dist
from rlctl.weights.dtensor import DTensorWorld, module_layout
from rlctl.weights.megatron import MegatronWorld
from rlctl.weights.transfer_plan import SingleWorld, World
from rlctl.weights.vllm import VllmParallel, VllmWorld, below_one_another, qkv_rows
from support.layout_families import FAMILIES, SIZES, gather, numbered, problems, published, run, scatter

FEW = settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
LAYOUTS = ("megatron", "vllm", "dtensor", "modules", "torch_dist", "chunks")


def facts_of(draw: st.DrawFn) -> ModelFacts:
    """A model of any family with drawn sizes; heads, experts and layers are such that some sharding exists."""
    facts = FAMILIES[draw(st.sampled_from(sorted(FAMILIES)))]
    groups = draw(st.sampled_from([1, 2, 4]))
    heads = groups * draw(st.sampled_from([1, 2, 3]))
    sizes = {"heads": heads, "kv_heads": heads if facts.mla else groups, "layers": draw(st.sampled_from([2, 4]))}
    sizes |= {"hidden": 4 * draw(st.integers(1, 4)), "vocab": draw(st.integers(5, 40))}
    sizes |= {"intermediate": 8 * draw(st.integers(1, 3))}
    return replace(facts, **sizes, mtp_layers=0)


def world_of(draw: st.DrawFn, kind: str, facts: ModelFacts) -> World:
    size = st.sampled_from([1, 2, 4])
    if kind == "megatron":
        tp, dp, pp = draw(size), draw(size), draw(st.sampled_from([1, 2]))
        experts = draw(st.sampled_from([1, 2])) if facts.moe else 1
        vpp = 2 if pp == 2 and facts.layers == 4 and draw(st.booleans()) else 1
        first = draw(st.sampled_from([None, 1])) if pp == 2 and vpp == 1 else None
        parallel = ParallelSpec(
            tp=tp,
            pp=pp,
            dp=dp,
            cp=draw(st.sampled_from([1, 1, 2])),
            ep=experts,
            etp=draw(st.sampled_from([1, tp])),
            vpp=vpp,
            first_stage_layers=first,
            last_stage_layers=facts.layers - 1 if first and draw(st.booleans()) else None,
        )
        module = "sequential" if facts.family == "gpt_oss" else draw(st.sampled_from(["sequential", "grouped"]))
        return MegatronWorld(
            facts, parallel, draw(st.sampled_from(["local", "te"])), "float64", module, draw(st.booleans())
        )
    if kind == "vllm":
        two = st.sampled_from([1, 2])
        return VllmWorld(facts, VllmParallel(draw(size), draw(two), draw(st.booleans()), draw(two)), "float64")
    if kind == "dtensor":
        copies = draw(st.sampled_from([1, 2]))
        sizes = {"tp": draw(size), "cp": draw(st.sampled_from([1, 1, 2])), "dp": copies * draw(st.integers(1, 3))}
        ep = draw(st.sampled_from([1, 2])) if facts.moe and sizes["cp"] * sizes["dp"] // copies % 2 == 0 else 1
        return DTensorWorld(facts, ParallelSpec(**sizes, ep=ep, replicate=copies), "float64")
    if kind == "modules":
        return SingleWorld(module_layout(facts, "float64"))
    style = torch_dist.KeyStyle(torch_dist.default_style(facts).stacked and draw(st.booleans()))
    if facts.family != "gpt_oss" and not style.stacked:
        style = replace(style, singleton=draw(st.booleans()))
    whole = torch_dist.layout(facts, "float64", style)
    if kind == "torch_dist":
        return SingleWorld(whole)
    limit = draw(st.integers(1, 2000))
    blocks = [
        chunk
        for key, spec in whole.params.items()
        for chunk in torch_dist.chunk_of(spec, key, torch_dist.lead_axes(key, facts, style), limit)
    ]
    return SingleWorld(torch_dist.chunked(whole, blocks))


@st.composite
def pairs(draw: st.DrawFn, first: str, second: str) -> tuple[ModelFacts, World, World]:
    facts = facts_of(draw)
    return facts, world_of(draw, first, facts), world_of(draw, second, facts)


@pytest.mark.parametrize("second", LAYOUTS)
@pytest.mark.parametrize("first", LAYOUTS)
@FEW
@given(data=st.data())
@pytest.mark.slow
@pytest.mark.guard
def test_gather_of_scatter_is_the_model_through_every_pair(data: st.DataObject, first: str, second: str) -> None:
    try:
        facts, one, two = data.draw(pairs(first, second))
        plain, tensors = published(facts), numbered(facts)
        held = scatter(tensors, plain, one)
        moved = [run(one, held, two, rank) for rank in range(two.size)]
    except ConfigError:
        return  # sizes that do not divide are refused, which test_refusals is about
    for name, value in gather(moved, two, plain).items():
        assert np.array_equal(value, tensors[name]), name


def every_world(facts: ModelFacts) -> Iterator[World]:
    experts = {"ep": 2, "etp": 1 if facts.family == "gpt_oss" else 2} if facts.moe else {}
    yield MegatronWorld(facts, ParallelSpec(tp=2, pp=2, dp=2, **experts), "te")
    yield MegatronWorld(facts, ParallelSpec(tp=2, pp=2, vpp=2, etp=1), "local")
    yield DTensorWorld(facts, ParallelSpec(tp=2, dp=6, replicate=2))
    yield DTensorWorld(facts, ParallelSpec(tp=2, dp=4, ep=2 if facts.moe else 1))
    yield VllmWorld(facts, VllmParallel(4))
    yield VllmWorld(facts, VllmParallel(2, 2, ep=True))
    yield VllmWorld(facts, VllmParallel(2, 2, ep=True, pp=2))


def test_layers_of_a_stage_are_those_that_vllm_gives_it() -> None:
    """As `get_pp_indices` of vLLM deals them: what is left over goes to the stages before the last, from there back."""
    found = {(layers, pp): [len(VllmParallel(pp=pp).stage_layers(layers, at)) for at in range(pp)]
             for layers, pp in ((8, 2), (9, 2), (10, 4), (11, 4), (61, 8))}  # fmt: skip
    assert found == {
        (8, 2): [4, 4], (9, 2): [5, 4], (10, 4): [2, 3, 3, 2], (11, 4): [3, 3, 3, 2], (61, 8): [7, 7, 8, 8, 8, 8, 8, 7]
    }  # fmt: skip
    stages = [VllmParallel(pp=4).stage_layers(10, at) for at in range(4)]
    assert [layer for stage in stages for layer in stage] == list(range(10))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_rank_of_every_engine_is_covered_exactly_once(name: str) -> None:
    for world in every_world(FAMILIES[name]):
        for rank in range(world.size):
            assert problems(world.layout(rank)) == []


@pytest.mark.parametrize("name", ["deepseek_v3", "llama-tied"])
def test_moving_between_unequal_worlds_keeps_every_element(name: str) -> None:
    facts = FAMILIES[name]
    tensors, plain = numbered(facts), published(facts)
    few, many = (2, 4) if facts.moe else (1, 1)
    one = MegatronWorld(facts, ParallelSpec(tp=2, pp=2, dp=2, ep=few, etp=1), "te", "float64")
    two = MegatronWorld(facts, ParallelSpec(tp=4, ep=many, etp=1), "local", "float64", "grouped")
    held = scatter(tensors, plain, one)
    moved = [run(one, held, two, rank) for rank in range(two.size)]
    for tensor, value in gather(moved, two, plain).items():
        assert np.array_equal(value, tensors[tensor]), tensor


def test_rows_of_the_fused_qkv_matrix_are_queries_key_value_of_each_group() -> None:
    facts = FAMILIES["llama"]  # 4 heads of 8 in 2 groups
    tensors = numbered(facts)
    world = MegatronWorld(facts, ParallelSpec(tp=2), dtype="float64")
    rank1 = scatter(tensors, published(facts), world)[1]["decoder.layers.0.self_attention.linear_qkv.weight"]
    q, k, v = (tensors[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv")
    assert np.array_equal(rank1, np.concatenate([q[16:32], k[8:16], v[8:16]]))


def test_gate_and_up_lie_behind_one_another_on_each_rank() -> None:
    facts = FAMILIES["llama"]
    tensors = numbered(facts)
    world = MegatronWorld(facts, ParallelSpec(tp=2), dtype="float64")
    rank1 = scatter(tensors, published(facts), world)[1]["decoder.layers.2.mlp.linear_fc1.weight"]
    gate, up = (tensors[f"model.layers.2.mlp.{x}_proj.weight"] for x in ("gate", "up"))
    assert np.array_equal(rank1, np.concatenate([gate[12:], up[12:]]))


def test_interleaved_experts_of_gpt_oss_are_taken_apart() -> None:
    facts = FAMILIES["gpt_oss"]
    tensors = numbered(facts)
    world = MegatronWorld(facts, ParallelSpec(), dtype="float64")
    held = scatter(tensors, published(facts), world)[0]
    fused = tensors["model.layers.1.mlp.experts.gate_up_proj"][3]  # [in, 2 out]
    expected = np.concatenate([fused[:, 0::2].T, fused[:, 1::2].T])
    assert np.array_equal(held["decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"], expected)


def test_vllm_repeats_kv_heads_and_shares_the_padded_vocabulary() -> None:
    facts = FAMILIES["llama"]
    tensors, plain = numbered(facts), published(facts)
    held = scatter(tensors, plain, VllmWorld(facts, VllmParallel(4), "float64"))
    q, k, v = (tensors[f"model.layers.3.self_attn.{x}_proj.weight"] for x in "qkv")
    name = "model.layers.3.self_attn.qkv_proj.weight"
    assert np.array_equal(held[1][name], np.concatenate([q[8:16], k[0:8], v[0:8]]))
    assert np.array_equal(held[2][name], np.concatenate([q[16:24], k[8:16], v[8:16]]))
    assert [h["lm_head.weight"].shape[0] for h in held] == [16, 16, 16, 2]  # 50 rows in 64


def test_a_matrix_that_is_published_as_one_is_taken_apart_by_its_parts() -> None:
    rows = below_one_another(qkv_rows(4, 2, 8, 8, tp=2, rank=1))
    assert [(part.total, part.first, part.count) for part in rows] == [(64, 16, 16), (64, 40, 8), (64, 56, 8)]


def test_the_last_stage_has_its_own_copy_of_a_tied_embedding() -> None:
    facts = FAMILIES["llama-tied"]
    tensors = numbered(facts)
    world = MegatronWorld(facts, ParallelSpec(pp=2), dtype="float64")
    first, last = scatter(tensors, published(facts), world)
    assert np.array_equal(first["embedding.word_embeddings.weight"], last["output_layer.weight"])
    assert "output_layer.weight" not in first


def test_layers_of_stages_and_chunks() -> None:
    facts = replace(FAMILIES["llama"], layers=8)
    world = MegatronWorld(facts, ParallelSpec(pp=2, vpp=2))
    assert [world.layers_of(stage) for stage in range(2)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    uneven = MegatronWorld(facts, ParallelSpec(pp=4, first_stage_layers=1, last_stage_layers=3))
    assert [uneven.layers_of(stage) for stage in range(4)] == [[0], [1, 2], [3, 4], [5, 6, 7]]


OUTSIDE_OF_LAYERS = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "lm_head.bias")
IN_A_LAYER = ("block_sparse_moe.router.weight", "block_sparse_moe.experts.down_proj")


@pytest.mark.parametrize("head", [True, False])
def test_a_module_that_transformers_lists_keeps_its_name_and_a_critic_has_nothing_of_the_head(head: bool) -> None:
    listed = (
        *(ListedTensor(name, (50, 16)) for name in OUTSIDE_OF_LAYERS),
        *(ListedTensor(f"model.layers.{{layer}}.{name}", (4, 16, 8), (0, 1)) for name in IN_A_LAYER),
    )
    world = DTensorWorld(ModelFacts("Listed", **SIZES | {"layers": 2}, listed=listed), ParallelSpec(dp=2), head=head)
    names = {name for name in OUTSIDE_OF_LAYERS if head or not name.startswith("lm_head")}
    names |= {f"model.layers.{layer}.{name}" for layer in (0, 1) for name in IN_A_LAYER}
    assert world.modules.params.keys() == world.layout(1).params.keys() == world.roles.keys() == names
    assert world.roles["model.layers.1.block_sparse_moe.router.weight"] is Role.ROUTER


@pytest.mark.parametrize(
    ("parallel", "word"),
    [(ParallelSpec(tp=3), "tp"), (ParallelSpec(pp=5), "pp"), (ParallelSpec(dp=3, ep=3), "ep")],
)
def test_refusals_name_the_flag(parallel: ParallelSpec, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        MegatronWorld(FAMILIES["qwen3_moe"], parallel).layout(0)
