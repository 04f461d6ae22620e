"""Which parts of published tensors each kind of vLLM's layers holds (`live` walks a model with it).

Sources (vLLM 0.32): model_executor/layers/linear.py, vocab_parallel_embedding.py, attention/mla_attention.py,
fused_moe/routed_experts.py and models/gpt_oss.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rlctl.backends.vllm import compat
from rlctl.backends.vllm.sites import Form, Part, Site

CORRECTION_BIAS = "e_score_correction_bias"
# What fused modules consist of, where a model's class does not list them.
FUSED = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
    "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
}


def walk(model: torch.nn.Module) -> list[Site]:
    """Sites of all modules."""
    fused: dict[str, list[str]] = FUSED | getattr(model, "packed_modules_mapping", {})
    paths = {id(module): path for path, module in model.named_modules()}
    return [site for path, module in model.named_modules() for site in _of_module(path, module, fused, paths)]


def _of_module(
    path: str, module: torch.nn.Module, fused: dict[str, list[str]], paths: dict[int, str]
) -> Iterator[Site]:
    kind = {base.__name__ for base in type(module).__mro__}
    if "VocabParallelEmbedding" in kind:
        yield _embedding(path, module, output="ParallelLMHead" in kind).because(compat.why_quantised(module))
    elif "LinearBase" in kind:
        why = compat.why_quantised(module)
        yield from (site.because(why) for site in _linear(path, module, kind, fused))
        yield from _correction_bias(path, module, path)
    elif "MLAAttention" in kind:
        yield from _absorbed(path, module, paths)
    elif "RoutedExperts" in kind or ("FusedMoE" in kind and hasattr(module, "w13_weight")):
        yield from _experts(path, module)
        yield from _correction_bias(path, module, f"{_block(path)}.gate", derived=True)
    elif any("Norm" in name for name in kind) and list(module.parameters(recurse=False)):
        yield from _whole(path, module)
    if isinstance(getattr(module, "sinks", None), torch.nn.Parameter):
        yield from _sinks(path, module)
    router = getattr(module, "router", None)
    if router is not None and not isinstance(router, torch.nn.Module):
        yield from _correction_bias(f"{path}.router", router, f"{_block(path)}.gate", derived=True)


def _whole(path: str, module: torch.nn.Module) -> Iterator[Site]:
    """A module whose parameters are stored as published and on every rank (norms)."""
    for name, parameter in module.named_parameters(recurse=False):
        shape = tuple(parameter.shape)
        part = Part(f"{path}.{name}", shape, (0,) * len(shape), 0, shape[0])
        yield Site(path, module, name, (part,), 1 if len(shape) == 1 else shape[1])


def _embedding(path: str, module: Any, output: bool) -> Site:
    indices, width = module.shard_indices, module.embedding_dim
    shape = (module.org_vocab_size, width)
    rows = indices.org_vocab_end_index - indices.org_vocab_start_index
    part = Part(f"{path}.weight", shape, (indices.org_vocab_start_index, 0), 0, rows)
    return Site(path, module, "weight", (part,), width, _form(module), lookup=not output, output=output)


def _linear(path: str, module: Any, kind: set[str], fused: dict[str, list[str]]) -> Iterator[Site]:
    parent, _, leaf = path.rpartition(".")
    names = [f"{parent}.{name}" if parent else name for name in fused.get(leaf, [leaf])]
    tp = 1 if getattr(module, "disable_tp", False) else getattr(module, "tp_size", 1)
    rank = getattr(module, "tp_rank", 0) if tp > 1 else 0
    if "RowParallelLinear" in kind:
        width = module.input_size // tp
        part = Part(f"{path}.weight", (module.output_size, module.input_size), (0, rank * width), 0, module.output_size)
        blocks = [(path, module.output_size, 0, module.output_size)]
        yield Site(path, module, "weight", (part,), width, _form(module))
    else:
        blocks = _output_blocks(module, kind, names, tp, rank)
        if blocks is None:
            return
        width, row, parts = module.input_size, 0, []
        for name, full, first, rows in blocks:
            parts.append(Part(f"{name}.weight", (full, width), (first, 0), row, rows))
            row += rows
        yield Site(path, module, "weight", tuple(parts), width, _form(module))
    if getattr(module, "bias", None) is not None:
        row, parts = 0, []
        for name, full, first, rows in blocks:
            parts.append(Part(f"{name}.bias", (full,), (first,), row, rows))
            row += rows
        yield Site(path, module, "bias", tuple(parts), 1)


def _output_blocks(
    module: Any, kind: set[str], names: list[str], tp: int, rank: int
) -> list[tuple[str, int, int, int]] | None:
    """(published module, its full output size, first row here, rows here) of each part of a column-parallel matrix."""
    if "QKVParallelLinear" in kind:
        head, v_head = module.head_size, getattr(module, "v_head_size", module.head_size)
        kv_rank = rank // module.num_kv_head_replicas
        q = (module.total_num_heads * head, rank * module.num_heads * head, module.num_heads * head)
        k = (module.total_num_kv_heads * head, kv_rank * module.num_kv_heads * head, module.num_kv_heads * head)
        v = (module.total_num_kv_heads * v_head, kv_rank * module.num_kv_heads * v_head, module.num_kv_heads * v_head)
        blocks = [q, k, v]
    elif "MergedColumnParallelLinear" in kind:
        blocks = [(size, rank * (size // tp), size // tp) for size in module.output_sizes]
    else:
        rows = module.output_size // tp if "ColumnParallelLinear" in kind else module.output_size
        blocks = [(module.output_size, rank * rows if "ColumnParallelLinear" in kind else 0, rows)]
    if len(blocks) != len(names):
        return None
    return [(name, *block) for name, block in zip(names, blocks, strict=True)]


def _form(module: torch.nn.Module) -> Form:
    product = getattr(module, "cpu_linear", None)
    # The plain fallback is a lambda around the live weight: it reads the parameter at each call.
    packed = product is not None and bool(getattr(product, "__closure__", None))
    return Form.REPACKED if packed else Form.PLAIN


def _block(path: str) -> str:
    """The MoE block that experts or their router belong to."""
    return path.removesuffix(".routed_experts").removesuffix(".experts")


def _correction_bias(path: str, holder: Any, gate: str, derived: bool = False) -> Iterator[Site]:
    """The expert score correction bias, as the gate, the experts and the router hold it: each must be up to date."""
    bias = getattr(holder, CORRECTION_BIAS, None)
    if isinstance(bias, torch.Tensor):
        shape = tuple(bias.shape)
        part = Part(f"{gate}.{CORRECTION_BIAS}", shape, (0,), 0, shape[0])
        yield Site(path, holder, CORRECTION_BIAS, (part,), 1, derived=derived)


def _sinks(path: str, module: Any) -> Iterator[Site]:
    """Attention sinks, one a head of this rank, in the module and in the kernel that computes with them."""
    heads = module.sinks.shape[0]
    tp, rank = _tensor_parallel()
    part = Part(f"{path}.sinks", (heads * tp,), (heads * rank,), 0, heads)
    yield Site(path, module, "sinks", (part,), 1)
    kernel = getattr(getattr(module, "attn", None), "impl", None)
    if isinstance(getattr(kernel, "sinks", None), torch.Tensor):
        yield Site(f"{path}.attn.impl", kernel, "sinks", (part,), 1, derived=True)


def _tensor_parallel() -> tuple[int, int]:
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    return get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()


def _absorbed(path: str, module: Any, paths: dict[int, str]) -> Iterator[Site]:
    """Latent attention decodes with the two halves of each head of kv_b, transposed and apart."""
    name, label = f"{paths[id(module.kv_b_proj)]}.weight", f"{path}.W_UK_T and W_UV"
    if why := _why_not_absorbed(module):
        yield Site(path, module, "W_UK_T", (_named(name),), 1, derived=True, opaque=why)
        return
    heads, keys, rank_size = module.W_UK_T.shape
    values = module.W_UV.shape[2]
    tp, rank = _tensor_parallel()
    shape = (tp * heads * (keys + values), rank_size)
    for head in range(heads):
        row = (rank * heads + head) * (keys + values)
        key, value = Part(name, shape, (row, 0), 0, keys), Part(name, shape, (row + keys, 0), 0, values)
        yield Site(path, module, "W_UK_T", (key,), rank_size, index=head, label=label, derived=True)
        yield Site(path, module, "W_UV", (value,), rank_size, index=head, label=label, derived=True, transposed=True)


def _why_not_absorbed(module: Any) -> str:
    """Why the halves of kv_b are not its own elements; empty: they are."""
    if why := compat.why_quantised(module.kv_b_proj):
        return f"is made from kv_b_proj, which {why}"
    return "" if hasattr(module, "W_UK_T") and hasattr(module, "W_UV") else "is kept in an order of the kernel's own"


def _named(tensor: str) -> Part:
    """The part of an opaque site."""
    return Part(tensor, (), (), 0, 0)


def _experts(path: str, module: Any) -> Iterator[Site]:
    order = compat.expert_order(module)
    stacked = bool(getattr(module, "w13_bias", None) is not None) and "GptOss" in type(module).__name__
    if order.reason:
        parts = tuple(_named(name) for name in _expert_names(f"{_block(path)}.experts", module, stacked))
        own = next((name for name, _ in module.named_parameters(recurse=False) if name != CORRECTION_BIAS), "weights")
        yield Site(path, module, own, parts, 1, opaque=order.reason)
        return
    form = Form.PERMUTED if order.isa else Form.PLAIN
    shard = compat.expert_shard(module)
    maker = _stacked_expert if stacked else _expert
    for local, expert in enumerate(compat.local_experts(module)):
        for parameter, parts, columns in maker(path, module, expert, shard, order.swapped):
            if parameter.endswith("bias"):
                yield Site(path, module, parameter, parts, 1, index=local)
            else:
                yield Site(
                    path, module, parameter, parts, columns, form, index=local, isa=order.isa, transposed=stacked
                )


def _expert_names(prefix: str, module: Any, stacked: bool) -> list[str]:
    """The published tensors of this rank's experts."""
    if stacked:
        return [f"{prefix}.{name}{end}" for name in ("gate_up_proj", "down_proj") for end in ("", "_bias")]
    names = compat.expert_names(module)
    return [f"{prefix}.{expert}.{name}.weight" for expert in compat.local_experts(module) for name in names]


Held = Iterator[tuple[str, tuple[Part, ...], int]]
"""(parameter, parts of one expert in it, width of its matrix)"""


def _expert(path: str, module: Any, expert: int, shard: compat.ExpertShard, swapped: bool) -> Held:
    """One expert of a model that publishes each expert's matrices apart."""
    hidden, width, rank = shard.hidden, shard.width, shard.rank
    ffn, half = width * shard.ranks, module.w13_weight.shape[1] // 2
    prefix = f"{_block(path)}.experts.{expert}"
    gate, up, down = compat.expert_names(module)
    first, second = (up, gate) if swapped else (gate, up)
    halves = (
        Part(f"{prefix}.{first}.weight", (ffn, hidden), (rank * width, 0), 0, width),
        Part(f"{prefix}.{second}.weight", (ffn, hidden), (rank * width, 0), half, width),
    )
    yield "w13_weight", halves, hidden
    yield "w2_weight", (Part(f"{prefix}.{down}.weight", (hidden, ffn), (0, rank * width), 0, hidden),), width


def _stacked_expert(path: str, module: Any, expert: int, shard: compat.ExpertShard, swapped: bool) -> Held:
    """One expert of gpt-oss: tensors [E, in, out] of all experts, gate and up columns taking turns."""
    hidden, width, rank = shard.hidden, shard.width, shard.rank
    count, ffn = module.moe_config.num_experts, width * shard.ranks
    prefix = f"{_block(path)}.experts"
    up, down = (count, hidden, 2 * ffn), (count, ffn, hidden)
    first = 2 * rank * width
    yield "w13_weight", (Part(f"{prefix}.gate_up_proj", up, (expert, 0, first), 0, hidden),), 2 * width
    yield "w2_weight", (Part(f"{prefix}.down_proj", down, (expert, rank * width, 0), 0, width),), hidden
    yield "w13_bias", (Part(f"{prefix}.gate_up_proj_bias", (count, 2 * ffn), (expert, first), 0, 2 * width),), 1
    # The ranks' products are added up, so the first rank alone holds the bias and the others hold zeros.
    bias = (Part(f"{prefix}.down_proj_bias", (count, hidden), (expert, 0), 0, hidden),) if rank == 0 else ()
    yield "w2_bias", bias, 1
