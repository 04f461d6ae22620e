"""A policy of transformers' modules under FSDP2 is the same model: against plain transformers and torch AdamW, and
against the Megatron backend, in float32."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rlctl.backends.batching.packed_rows import PackedRow
from rlctl.backends.clients import only_result
from rlctl.backends.dtensor.model import require_causal
from rlctl.backends.dtensor.optimizer import build_optimizer
from rlctl.checkpoints.conversion.hf_megatron import megatron_to_hf
from rlctl.checkpoints.hf.model_facts import facts_in
from rlctl.checkpoints.hf.safetensors_files import SafetensorsDirectory
from rlctl.checkpoints.inspection import inspect
from rlctl.config.parallel import ParallelSpec
from rlctl.errors import InputError
from support.dtensor_cases import run_changed, run_memory
from support.family_models import FAMILIES, OTHERS, SEPARATE
from support.family_models import hf_model as family_model
from support.lora_cases import LORA
from support.parallel_cases import WEIGHT, Case, assemble, of_family, of_modules, run_case, run_checkpoint, spec_of
from support.parallel_families import make_batch as family_batch
from support.pool import Pools, Published, slowly
from support.reference_policy import (
    Optim,
    Reference,
    close,
    facts,
    hf_model,
    make_batch,
    megatron_weights,
    run_reference,
)
from support.transformers_reference import expected

EVEN = 252
"""A vocabulary that two ranks divide."""
WITHOUT_CONFIG = "no config.json next to it: `megatron-to-hf` needs --config-from"
TOLERANCE = 1e-6
"""Of loss, gradients, their norm and parameters after two steps, times max(1, |reference|)."""


@cache
def expected_of(family: str) -> Reference:
    return expected(family_model(family, EVEN), family_batch())


def check_family(pools: Pools, directory: Path, family: str, parallel: ParallelSpec) -> None:
    family_model(family, EVEN).save_pretrained(directory)
    assert bool(facts_in(directory).unpacked) == (family in SEPARATE)
    shared = family in ("gemma3", "gpt-oss", "llama3", "gemma2", "granite")
    check_model(pools, directory, parallel, expected_of(family), shared)


def check_model(
    pools: Pools, directory: Path, parallel: ParallelSpec, wanted: Reference, share_prompts: bool = False
) -> None:
    facts = facts_in(directory)
    case = of_family(facts, parallel, share_prompts)
    ranks = pools(parallel.world_size).run(run_case, case, directory, family_batch(), None, facts)
    grads, _ = assemble([rank.grads for rank in ranks])
    for rank in ranks:
        for key, value in rank.logprobs.items():
            assert close(value, wanted.logprobs[key], 1e-5), key
    first = only_result([rank.results[0] for rank in ranks])
    assert abs(first.loss - wanted.losses[0]) <= 1e-5
    unclip = max(1.0, (first.grad_norm + 1e-6) / Optim().clip)
    for name, value in wanted.module_grads.items():
        ours = grads[name] * unclip
        assert close(ours, value, TOLERANCE), (name, (ours - value).abs().max())


DIFFERENT = {
    name: name for name in ("llama3", "qwen2-yarn", "mistral-windowed", "mixtral", "moonlight", "gemma3", "gpt-oss")
}
"""Families whose attention, positions or experts no other test here has."""
EXPERTS = ("mixtral", "moonlight", "gpt-oss", "glm4-moe")
DENSE = ("llama3", "qwen2-yarn", "mistral-windowed", "gemma3", "granite", "smollm3", "seed-oss", "ernie4-5")


@pytest.mark.parametrize("family", slowly(DIFFERENT, "qwen2-yarn", "gemma3", "gpt-oss"))
def test_every_family_is_the_model_of_transformers(pools: Pools, family: str, tmp_path: Path) -> None:
    check_family(pools, tmp_path, family, ParallelSpec())


PRODUCT = [(family, {"dp": 2}) for family in FAMILIES] + [(family, {"cp": 2}) for family in FAMILIES]
PRODUCT += [(family, {"tp": 2}) for family in (*DENSE, *EXPERTS)] + [(family, {"tp": 2, "dp": 2}) for family in DENSE]
PRODUCT += [(family, {"tp": 2, "dp": 2, "ep": 2}) for family in EXPERTS]
PRODUCT += [(family, {"dp": 2, "ep": 2}) for family in ("olmoe", "minimax-m2")]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "sizes"), PRODUCT, ids=[f"{f}-{'-'.join(s)}" for f, s in PRODUCT])
def test_every_family_under_every_sharding(pools: Pools, family: str, sizes: dict[str, int], tmp_path: Path) -> None:
    check_family(pools, tmp_path, family, ParallelSpec(**sizes))


@pytest.mark.slow
def test_no_rank_ever_holds_the_model(pools: Pools, published: Published, tmp_path: Path) -> None:
    """Not while it is built or read, either."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 16384, "initializer_range": 0.02}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, num_attention_heads=8, **sizes))
    model.save_pretrained(tmp_path)
    whole = sum(4 * p.numel() for p in model.parameters())
    case = of_modules(dp=4)
    tiny, large = (case, published("llama")), (case, tmp_path, facts_in(tmp_path))
    for grown in pools(4).run(run_memory, tiny, large):
        assert whole / 4 < grown < 0.5 * whole, grown / whole


SPREAD = ("qwen2-moe", "gemma4-moe", "phimoe", "nemotron-h", "qwen3-next", "granite-hybrid-mamba", "jamba")
"""Families without a file whose experts are divided here; the last four are computed one sequence after the other."""
UNKNOWN = {
    f"{family}-{'-'.join(sizes)}{sizes.get('dp', '') if family in SEPARATE else ''}": (family, sizes)
    for family in (*OTHERS, *SEPARATE)
    for sizes in (
        {"dp": 2},
        *([{"dp": 1}] if family in SEPARATE else [{"cp": 2}]),
        *([{"dp": 2, "ep": 2}] if family in SPREAD else []),
    )
}


@pytest.mark.parametrize(
    ("family", "sizes"),
    slowly(UNKNOWN, "gemma2-cp", "qwen2-moe-dp-ep", "gemma4-moe-dp-ep", "gpt2-cp", "lfm2-dp2", "falcon-dp1"),
)
def test_families_without_a_file_are_the_models_of_transformers(
    pools: Pools, family: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    check_family(pools, tmp_path, family, ParallelSpec(**sizes))


@pytest.mark.parametrize("kind", [pytest.param("llama-tied", marks=pytest.mark.slow), "qwen3moe"])
def test_bfloat16_is_computed_in_and_float32_is_kept(pools: Pools, published: Published, kind: str) -> None:
    case = Case(kind, ParallelSpec(dp=2), "bfloat16", backend="dtensor")
    ranks = pools(2).run(run_case, case, published(kind), make_batch())
    expected = run_reference(kind, make_batch(), WEIGHT)
    for key, value in ((key, value) for rank in ranks for key, value in rank.logprobs.items()):
        assert (value - expected.logprobs[key]).abs().mean() < 0.1, key
    result = only_result([rank.results[0] for rank in ranks])
    assert result.loss == pytest.approx(expected.losses[0], rel=0.02)
    assert result.grad_norm == pytest.approx(expected.norms[0], rel=0.05)
    for name, value in assemble([rank.params for rank in ranks])[0].items():
        assert value.dtype == torch.float32
        assert (value - expected.module_params[name]).abs().max() < 2e-3, name


@pytest.mark.slow
@pytest.mark.parametrize("family", ["minimax", "gemma4", "deepseek-v4"])
def test_stored_buffers_are_computed_with_in_bfloat16_and_kept(pools: Pools, family: str, tmp_path: Path) -> None:
    begun = family_model(family, EVEN)
    begun.save_pretrained(tmp_path)
    facts = facts_in(tmp_path)
    case = of_family(facts, ParallelSpec(dp=2), dtype="bfloat16")
    ranks = pools(2).run(run_case, case, tmp_path, family_batch(), None, facts)
    params, _ = assemble([rank.params for rank in ranks])
    expected = expected_of(family)
    for key, value in ((key, value) for rank in ranks for key, value in rank.logprobs.items()):
        assert (value - expected.logprobs[key]).abs().mean() < 0.1, key
    stored = {name: value for name, value in begun.named_buffers() if name in begun.state_dict()}
    assert stored
    for name, value in stored.items():
        assert torch.equal(params[name].flatten(), value.flatten()), name


def test_both_backends_take_the_same_steps(pools: Pools, published: Published) -> None:
    case = Case("qwen3", ParallelSpec(dp=2))
    pool, weights = pools(2), megatron_weights(case.kind, hf_model(case.kind).state_dict())
    ours, theirs = (
        pool.run(run_case, replace(case, backend="dtensor"), published(case.kind), make_batch()),
        pool.run(run_case, case, weights, make_batch()),
    )
    for one, other in zip(ours, theirs, strict=True):
        assert one.logprobs.keys() == other.logprobs.keys()
        assert all(close(value, other.logprobs[key], 1e-5) for key, value in one.logprobs.items())
    for step in range(2):
        one, other = (only_result([rank.results[step] for rank in ranks]) for ranks in (ours, theirs))
        assert one.sums.keys() == other.sums.keys()
        for name in ("loss", "grad_norm"):
            assert abs(getattr(one, name) - getattr(other, name)) <= TOLERANCE * max(1, abs(getattr(other, name)))


def outcome(ranks: list[Any]) -> tuple[Any, ...]:
    """What `run_checkpoint` has found: the results of the two second steps, and the parameters, whole."""
    results = (only_result([result for rank in ranks for result in rank[i]]) for i in (0, 2))
    return (*results, *(assemble([rank[i] for rank in ranks])[0] for i in (1, 3, 4)))


SAVED = {
    "same-dp2": (of_modules(dp=2),) * 2,
    "same-dp2-states-on-host": (replace(of_modules(dp=2), optimizer_offload=True),) * 2,
    "dp2-to-tp2": (of_modules("llama-tied", dp=2), of_modules("llama-tied", tp=2)),
    "moe-ep2-to-replicate2": (of_modules("deepseek", dp=2, ep=2), of_modules("deepseek", dp=2, replicate=2)),
    "moe-tp2-to-ep2": (of_modules("qwen3moe", tp=2), of_modules("qwen3moe", dp=2, ep=2)),
    "moe-ep2-tp2-to-shard4": (of_modules("deepseek", tp=2, dp=2, ep=2), of_modules("deepseek", dp=4)),
}


@pytest.mark.parametrize(("before", "after"), slowly(SAVED, "same-dp2-states-on-host", "dp2-to-tp2"))
def test_a_saved_policy_goes_on(pools: Pools, published: Published, before: Case, after: Case, tmp_path: Path) -> None:
    """Bitwise under the same sharding and within rounding under another; and a checkpoint is a model to load."""
    directory = tmp_path / "policy"
    directory.mkdir()
    pool = pools(before.parallel.world_size)
    ranks = pool.run(run_checkpoint, before, after, published(before.kind), make_batch(), directory)
    straight, resumed, kept, loaded, model = outcome(ranks)
    assert kept.keys() == loaded.keys() == model.keys()
    if before == after:
        assert straight == resumed
        assert all(torch.equal(loaded[name], value) for name, value in kept.items())
    assert abs(straight.loss - resumed.loss) < 1e-6
    assert abs(straight.grad_norm / resumed.grad_norm - 1) < 1e-5
    for name, value in kept.items():
        assert (loaded[name] - value).abs().max() < 1e-6, name
    megatron_to_hf(directory, tmp_path / "exported", config_from=published(before.kind))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32).state_dict()
    assert all(torch.equal(exported[name], value) for name, value in model.items())
    found = inspect(directory)
    assert (found.format, found.optimizer, found.problems) == ("dtensor torch_dist", True, [WITHOUT_CONFIG])
    assert any(not torch.equal(model[name], value) for name, value in kept.items())  # of the step before


SAVED_FAMILIES = ("apertus", "gemma4", "gemma4-moe", "minimax", "deepseek-v4", "nemotron-h", "kimi-linear", "hrm")
"""Families with stored buffers of each kind, and with each way in which several tensors are one."""


@pytest.mark.parametrize("family", slowly(SAVED_FAMILIES, "apertus"))
def test_a_saved_policy_of_a_family_without_a_file_goes_on(pools: Pools, family: str, tmp_path: Path) -> None:
    """Bitwise, and what is exported is what was trained, under the names and in the shapes that were published."""
    published, directory = tmp_path / "published", tmp_path / "policy"
    directory.mkdir()
    family_model(family, EVEN).save_pretrained(published)
    facts = facts_in(published)
    case = of_family(facts, ParallelSpec(dp=2))
    ranks = pools(2).run(run_checkpoint, case, case, published, family_batch(), directory, False, facts)
    straight, resumed, kept, loaded, model = outcome(ranks)
    assert straight == resumed
    assert all(torch.equal(loaded[name], value) for name, value in kept.items())
    assert megatron_to_hf(directory, tmp_path / "exported", config_from=published).verified
    files = [SafetensorsDirectory.open(place).tensors for place in (tmp_path / "exported", published)]
    written, read = ({name: (one.shape, one.dtype) for name, one in own.items()} for own in files)
    assert written == read
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32).state_dict()
    assert all(torch.equal(exported[name].view(value.shape), value) for name, value in model.items())
    begun = family_model(family, EVEN)
    stored = {name for name, _ in begun.named_buffers()} & model.keys()
    for name in stored:
        assert torch.equal(kept[name].float().flatten(), begun.get_buffer(name).float().flatten()), name
    assert bool(stored) == (family != "hrm")


CHANGED = {
    "dp2": Case("qwen3", ParallelSpec(dp=2)),
    "dp2-states-on-host": Case("llama-tied", ParallelSpec(dp=2), optimizer_offload=True),
    "moe-dp2-ep2": Case("deepseek", ParallelSpec(dp=2, ep=2)),
    "moe-tp2": Case("qwen3moe", ParallelSpec(tp=2)),
    "adapters-dp2-states-on-host": Case("qwen3", ParallelSpec(dp=2), optimizer_offload=True, lora=LORA),
    "adapters-mla-dp2-ep2": Case("deepseek", ParallelSpec(dp=2, ep=2), lora=LORA),
}


@pytest.mark.parametrize("case", slowly(CHANGED, "moe-dp2-ep2", "adapters-dp2-states-on-host"))
def test_a_run_may_change_its_backend_and_change_back(
    pools: Pools, published: Published, case: Case, tmp_path: Path
) -> None:
    """Weights and adapters are the same, and so are the loss and the gradients of the next step; the moments start from
    zero."""
    places = [tmp_path / "first", tmp_path / "second"]
    for place in places:
        place.mkdir()
    weights = megatron_weights(case.kind, hf_model(case.kind).state_dict())
    ranks = pools(2).run(run_changed, case, published(case.kind), weights, make_batch(), places)
    straight, changed, back = (only_result([rank[0][i] for rank in ranks]) for i in range(3))
    for ours in (changed, back):
        assert abs(ours.loss - straight.loss) <= TOLERANCE
        assert ours.grad_norm == pytest.approx(straight.grad_norm, rel=1e-5)
    for _, (saved, read) in ranks:
        assert saved.keys() == read.keys()
        assert all(torch.equal(read[name], value) for name, value in saved.items())


def test_norms_and_biases_are_not_decayed() -> None:
    """Command R's norms of queries and keys have a weight for each head, so that they have two axes."""
    model = family_model("cohere")
    model.model.layers[0].self_attn.o_proj.bias = torch.nn.Parameter(torch.zeros(64))
    names = {id(value): name for name, value in model.named_parameters()}
    groups = build_optimizer(spec_of(Case()), model).param_groups
    plain = {names[id(value)] for group in groups if not group["decays"] for value in group["params"]}
    assert model.model.layers[0].self_attn.q_norm.weight.dim() == 2
    assert plain == {name for name in names.values() if "norm" in name or name.endswith("bias")}
    assert len(plain) == 4 * 3 + 1 + 1


def test_rates_of_state_space_layers_are_not_decayed() -> None:
    model = family_model("mamba")
    names = {id(value): name for name, value in model.named_parameters()}
    groups = build_optimizer(spec_of(Case()), model).param_groups
    plain = {names[id(value)] for group in groups if not group["decays"] for value in group["params"]}
    rates = {name for name in names.values() if name.endswith((".A_log", ".D"))}
    assert model.backbone.layers[0].mixer.A_log.dim() == 2
    assert rates <= plain
    assert not any("proj.weight" in name for name in plain)


class Means(torch.nn.Module):
    """A policy whose tokens see those before them, and with `seen` some that they must not see."""

    def __init__(self, seen: str) -> None:
        super().__init__()
        self.seen, self.table = seen, torch.nn.Parameter(torch.arange(64.0))

    def forward(self, row: PackedRow) -> torch.Tensor:
        values_BL = self.table[row.tokens_T].view(len(row.units), -1)
        found_BL = values_BL.cumsum(1)
        if self.seen == "later":
            found_BL = found_BL + values_BL.flip(1).cumsum(1).flip(1)
        elif self.seen == "others":
            found_BL = found_BL + values_BL.mean(0)
        return found_BL.flatten()[row.sources_U][row.inverse_R][None]


@pytest.mark.parametrize("seen", ["", "later", "others"])
def test_a_model_that_looks_ahead_or_at_other_rollouts_is_refused(seen: str) -> None:
    spec = replace(spec_of(Case()), facts=replace(facts("llama"), vocab=64, family="MeansForCausalLM"))
    if not seen:
        require_causal(Means(seen), spec)  # type: ignore[arg-type]
        return
    with pytest.raises(InputError, match=r"MeansForCausalLM cannot be trained: .* tokens behind it or with another"):
        require_causal(Means(seen), spec)  # type: ignore[arg-type]
