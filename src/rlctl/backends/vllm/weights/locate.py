"""Find the published tensors in a running vLLM model, in the engine's worker. `weights/vllm.py` describes each kind of
layer; this file finds kinds, sizes, storage, and unknown parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch

from rlctl.backends.vllm import compat
from rlctl.errors import VerificationError
from rlctl.weights import vllm as held
from rlctl.weights.vllm import LocalMatrix, MatrixPart, Rows

CORRECTION_BIAS = "e_score_correction_bias"
# Architectures whose modules in vLLM have other names than the published tensors: (vLLM's, published).
RENAMED = {
    "GptOssForCausalLM": ((".attn.", ".self_attn."), ("model.embedding.", "model.embed_tokens.")),
    "MiniMaxM2ForCausalLM": ((f".gate.{CORRECTION_BIAS}", f".{CORRECTION_BIAS}"),),
    "HYV3ForCausalLM": ((f".gate.{CORRECTION_BIAS}", ".expert_bias"), (".mlp.gate.", ".mlp.router.gate.")),
    "LagunaForCausalLM": ((f".gate.{CORRECTION_BIAS}", f".experts.{CORRECTION_BIAS}"),),
    "GPTNeoXForCausalLM": (("lm_head.", "embed_out."),),
    "Qwen2_5_VLForConditionalGeneration": (
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ),
    "Qwen3VLForConditionalGeneration": (
        ("language_model.model.", "model.language_model."),
        ("language_model.lm_head.", "lm_head."),
        ("visual.", "model.visual."),
    ),
}
# Classes whose fused modules are published fused, although their tables split them.
UNFUSED = {"Glm4ForCausalLM": {"gate_up_proj": ["gate_up_proj"]}}
# Classes whose loader reorders the contents of these modules.
REORDERED = {
    "BloomForCausalLM": ("query_key_value",),
    "FalconForCausalLM": ("query_key_value",),
    "GPT2LMHeadModel": ("c_attn", "c_proj", "c_fc"),
}
DIVIDED_NORM = "MiniMaxText01RMSNormTP"  # normalizes over all heads; a rank holds some of them
DIGIT_BITS = 8  # indices travel as digits that every floating-point type of weights holds exactly


class Storage(Enum):
    """How a module keeps a matrix."""

    PLAIN = "plain"
    REPACKED = "repacked"
    """In a copy that only the module's product can read."""
    PERMUTED = "permuted"
    """The same elements in the order of the CPU's grouped product of experts (`pack_expert`)."""


@dataclass(frozen=True, kw_only=True)
class StoredMatrix(LocalMatrix):
    """A matrix or vector of a running model, and how its module keeps it."""

    module: Any
    """The module or other object that has `parameter` as an attribute."""
    storage: Storage = Storage.PLAIN
    lookup: bool = False
    """Rows are looked up in the parameter itself; a repacked copy is used for products."""
    output: bool = False
    """The output embedding."""
    isa: str = ""
    """PERMUTED: the instruction set that decides the order."""
    label: str = ""
    """The name in readings, if the boxes of one tensor lie in several matrices."""
    derived: bool = False
    """Made from, or the same memory as, what another module was loaded with: no loader writes here."""
    why_unknown: str = ""
    """Why the storage of the parts is unknown; shapes and rows are then meaningless. Empty: it is known."""

    @property
    def packed(self) -> bool:
        return self.storage is Storage.REPACKED

    @property
    def name(self) -> str:
        return self.label or self.full_name

    def because(self, reason: str) -> StoredMatrix:
        """The matrix as one of unknown storage; itself where `why` is empty."""
        return replace(self, why_unknown=reason) if reason else self

    def kept(self) -> torch.Tensor:
        """The tensor as the module stores it: the stack's matrix in its storage order."""
        value = getattr(self.module, self.parameter).data
        return value if self.index is None else value[self.index]

    def stored(self) -> torch.Tensor:
        """The matrix or vector in published rows and columns; a copy only if PERMUTED."""
        value = self.kept()
        if self.storage is Storage.PERMUTED:
            value = unpacked_expert(value, self.isa)
        return value.t() if self.transposed else value

    def box(self, part: MatrixPart, stored: torch.Tensor) -> torch.Tensor:
        """The view of `stored` that holds `part`, with as many dimensions as the published tensor."""
        rows = stored[part.row : part.row + part.rows]
        rows = rows[:, : self.columns] if self.columns else rows
        return rows if rows.dim() == len(part.shape) else rows.unsqueeze(0)


def _stored(matrix: LocalMatrix, module: Any, **kept: Any) -> StoredMatrix:
    return StoredMatrix(**vars(matrix), module=module, **kept)


# The order of experts on the CPU platform


def pack_expert(plain: torch.Tensor, kept: torch.Tensor, isa: str) -> None:
    """Write the matrix `plain` into `kept` in the order of the CPU's grouped product."""
    torch.ops._C.prepack_moe_weight(plain.unsqueeze(0), kept.unsqueeze(0), isa)


def unpacked_expert(kept: torch.Tensor, isa: str) -> torch.Tensor:
    """Return an expert's matrix [rows, columns] in published order from the kernel's."""
    order = _order(tuple(kept.shape), kept.dtype, isa)
    plain = torch.empty_like(kept).view(-1)
    plain[order] = kept.reshape(-1)
    return plain.view(kept.shape)


@lru_cache(maxsize=16)
def _order(shape: tuple[int, ...], dtype: torch.dtype, isa: str) -> torch.Tensor:
    """Published index of each element in the kernel's order, from packed index matrices. Raises VerificationError if
    not a permutation."""
    count = shape[0] * shape[1]
    index, order = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    for shift in range(0, max(1, (count - 1).bit_length()), DIGIT_BITS):
        digits = ((index >> shift) & ((1 << DIGIT_BITS) - 1)).to(dtype).view(shape)
        moved = torch.empty_like(digits)
        pack_expert(digits, moved, isa)
        order |= moved.view(-1).to(torch.int64) << shift
    if not torch.equal(order.sort().values, index):
        raise VerificationError(
            f"vLLM's order of experts ({isa}, {shape}) is not a permutation, so experts cannot be read back."
        )
    return order


# A model as a whole


class StoredMatrices(NamedTuple):
    """Everything found in a model."""

    found: list[StoredMatrix]
    """The matrices that rlctl can read and write itself."""
    unknown_storage: list[StoredMatrix]
    """StoredMatrices with known tensors in unknown storage."""
    unreadable: dict[str, str]
    """Parameter -> why its values are not known."""
    unknown: tuple[str, ...]
    """Unreadable parameters whose tensors are not known either."""


def stored_matrices(model: torch.nn.Module) -> StoredMatrices:
    """Return the parameters that rlctl can read and write itself, and the others."""
    every = _walk(model)
    if getattr(model.config, "tie_word_embeddings", False):
        every = _name_after_input_embedding(every)
    for vllm, published in _renamings(model):
        every = [_renamed(matrix, vllm, published) for matrix in every]
    every = [matrix.because(matrix.why_unknown or _why_misshapen(matrix)) for matrix in every]
    stored, unknown_storage = (
        [matrix for matrix in every if not matrix.why_unknown],
        [matrix for matrix in every if matrix.why_unknown],
    )
    readable = {matrix.full_name for matrix in stored}
    unreadable = {
        name: matrix.why_unknown for matrix in unknown_storage for name in _parameters(matrix) if name not in readable
    }
    covered = readable | set(unreadable)
    unknown = [name for name, _ in model.named_parameters() if name not in covered]
    for name in unknown:
        owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
        unreadable[name] = f"is stored in a private form of {owner}"
    return StoredMatrices(stored, unknown_storage, unreadable, tuple(unknown))


def stored_buffers(model: torch.nn.Module, sent: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Return the buffers of another family's model with names and shapes of tensors. The loader fills them."""
    if not sent or compat.is_of_known_family(model):
        return {}
    every = ((name, buffer) for name, buffer in model.named_buffers() if buffer is not None)
    return {name: buffer for name, buffer in every if sent.get(name) == tuple(buffer.shape)}


def matched(
    every: StoredMatrices, sent: Collection[str], loaded: Collection[str], buffers: Collection[str]
) -> StoredMatrices:
    """Matrices that match the tensors `sent`, with `loaded` through the loader. Only the loader matches layers of other
    names; their tensors cannot be read back, except `buffers`."""
    if not loaded:
        return every
    stored = [matrix for matrix in every.found if all(part.tensor in sent for part in matrix.parts)]
    stored_tensors = {
        *(part.tensor for matrix in (*stored, *every.unknown_storage) for part in matrix.parts),
        *buffers,
    }
    lost = [tensor for tensor in loaded if tensor not in stored_tensors]
    unreadable = every.unreadable | dict.fromkeys(lost, "has no place that is known: vLLM calls it otherwise")
    return StoredMatrices(stored, every.unknown_storage, unreadable, (*every.unknown, *lost))


def _parameters(matrix: StoredMatrix) -> Iterator[str]:
    yield matrix.full_name
    if isinstance(matrix.module, torch.nn.Module):
        yield from (f"{matrix.path}.{name}" for name, _ in matrix.module.named_parameters(recurse=False))


def elsewhere(model: torch.nn.Module) -> list[str]:
    """Return paths of modules on other workers: other pipeline stages and experts."""
    absent = [path for path, module in model.named_modules() if type(module).__name__ == "PPMissingLayer"]
    for path, module in model.named_modules():
        if "RoutedExperts" in {base.__name__ for base in type(module).__mro__}:
            local, experts = set(compat.local_experts(module)), cast(Any, module).moe_config.num_experts
            absent += [f"{_block(path)}.experts.{number}" for number in range(experts) if number not in local]
    return absent


def dtypes(model: torch.nn.Module, buffers: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The dtype of each published tensor in the engine: a router's correction bias is float32 among bfloat16."""
    buffer_dtypes = {name: str(buffer.dtype).removeprefix("torch.") for name, buffer in buffers.items()}
    return buffer_dtypes | {
        part.tensor: dtype_name(matrix) for matrix in stored_matrices(model).found for part in matrix.parts
    }


def dtype_name(matrix: StoredMatrix) -> str:
    """The dtype of the module's matrix, in the layouts' spelling."""
    return str(matrix.kept().dtype).removeprefix("torch.")


def _why_misshapen(matrix: StoredMatrix) -> str:
    if matrix.storage is Storage.REPACKED or not matrix.parts:
        return ""
    kept = matrix.kept()
    last, shape = max(part.row + part.rows for part in matrix.parts), tuple(kept.shape)
    if matrix.transposed:
        shape = shape[::-1]
    holds = len(shape) > 0 and shape[0] >= last and (len(shape) == 1 or shape[1] >= matrix.columns)
    return "" if holds else f"is kept with shape {tuple(kept.shape)}"


def _name_after_input_embedding(stored: list[StoredMatrix]) -> list[StoredMatrix]:
    name = next((matrix.parts[0].tensor for matrix in stored if matrix.lookup), None)
    if name is None:  # another pipeline stage has both
        return stored
    return [
        replace(matrix, parts=tuple(replace(part, tensor=name) for part in matrix.parts)) if matrix.output else matrix
        for matrix in stored
    ]


def _renamings(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Return replacements from vLLM's module names to published ones. Layers of transformers are at `model.` in
    vLLM."""
    prefix = getattr(getattr(model, "model", None), "base_model_prefix", "")
    if prefix not in ("", "model"):
        yield "model.", f"{prefix}."
    for name in {type(model).__name__, *(getattr(model.config, "architectures", None) or ())}:
        yield from RENAMED.get(name, ())


def _renamed(matrix: StoredMatrix, vllm: str, published: str) -> StoredMatrix:
    count = -1 if vllm.startswith(".") else 1

    def named(tensor: str) -> str:
        return tensor.replace(vllm, published, count) if count < 0 or tensor.startswith(vllm) else tensor

    return replace(matrix, parts=tuple(replace(part, tensor=named(part.tensor)) for part in matrix.parts))


# Its modules


def _walk(model: torch.nn.Module) -> list[StoredMatrix]:
    fused: dict[str, list[str]] = held.FUSED | getattr(model, "packed_modules_mapping", {})
    fused |= UNFUSED.get(type(model).__name__, {})
    paths = {id(module): path for path, module in model.named_modules()}
    whole = compat.reads_images(model)  # a tower's parameters, such as the embedding of a class
    modules = model.named_modules()
    stored = [matrix for path, module in modules for matrix in _of_module(path, module, fused, paths, whole)]
    return list(_with_order(model, stored))


def _with_order(model: torch.nn.Module, stored: list[StoredMatrix]) -> Iterator[StoredMatrix]:
    """Mark linear matrices that the model's loader reorders as unknown storage, by the source of models without a
    family file."""
    reordered = REORDERED.get(type(model).__name__)
    loader = "" if reordered else compat.reshaping_loader(model)
    for matrix in stored:
        reordered_here = matrix.path.rpartition(".")[2] in (reordered or ())
        linear = "LinearBase" in {base.__name__ for base in type(matrix.module).__mro__}
        reason = f"is reordered by {loader or type(model).__name__}" if reordered_here or (loader and linear) else ""
        yield matrix.because(reason)


def _of_module(
    path: str, module: torch.nn.Module, fused: dict[str, list[str]], paths: dict[int, str], whole: bool
) -> Iterator[StoredMatrix]:
    kind = {base.__name__ for base in type(module).__mro__}
    if "VocabParallelEmbedding" in kind:
        output = "ParallelLMHead" in kind
        table: Any = module
        first, end = table.shard_indices.org_vocab_start_index, table.shard_indices.org_vocab_end_index
        rows = Rows(table.org_vocab_size, first, end - first)
        matrix = held.stacked_rows(path, "weight", [f"{path}.weight"], [rows], table.embedding_dim)
        yield _stored(matrix, module, storage=_storage(module), lookup=not output, output=output).because(
            compat.why_quantized(module)
        )
    elif "LinearBase" in kind:
        reason = compat.why_quantized(module)
        yield from (matrix.because(reason) for matrix in _linear(path, module, kind, fused))
        yield from _correction_bias(path, module, path)
    elif "MLAAttention" in kind:
        yield from _latent_attention(path, module, paths)
    elif "RoutedExperts" in kind or ("FusedMoE" in kind and hasattr(module, "w13_weight")):
        yield from _experts(path, module)
        yield from _correction_bias(path, module, f"{_block(path)}.gate", derived=True)
    elif "MiniMaxM2MoE" in kind:  # it hands its bias on to the experts
        yield from _correction_bias(path, module, path)
    elif DIVIDED_NORM in kind:
        norm: Any = module
        ranks, rank = norm.weight_shard_world, norm.weight_shard_rank
        rows = held.equal_rows(norm.weight.shape[0] * ranks, ranks, rank)
        yield _stored(held.stacked_rows(path, "weight", [f"{path}.weight"], [rows]), module)
    elif "Embedding" in kind or "ConvLayerBase" in kind or any("Norm" in name for name in kind):
        yield from _replicated(path, module)
    elif whole:
        yield from _replicated(path, module, beside_loaders=True)
    if isinstance(getattr(module, "sinks", None), torch.nn.Parameter):
        yield from _sinks(path, module)
    router = getattr(module, "router", None)
    if router is not None and not isinstance(router, torch.nn.Module):
        yield from _correction_bias(f"{path}.router", router, f"{_block(path)}.gate", derived=True)


def _replicated(path: str, module: torch.nn.Module, *, beside_loaders: bool = False) -> Iterator[StoredMatrix]:
    """A module stored as published on every rank (norms, positions, convolutions), except custom-loaded parameters with
    `beside_loaders`."""
    for name, parameter in module.named_parameters(recurse=False):
        if parameter.dim() and not (beside_loaders and hasattr(parameter, "weight_loader")):
            yield _stored(held.replicated(path, name, tuple(parameter.shape)), module)


def _linear(path: str, module: Any, kind: set[str], fused: dict[str, list[str]]) -> Iterator[StoredMatrix]:
    parent, _, leaf = path.rpartition(".")
    names = [f"{parent}.{name}" if parent else name for name in fused.get(leaf, [leaf])]
    tp = 1 if getattr(module, "disable_tp", False) else getattr(module, "tp_size", 1)
    rank = getattr(module, "tp_rank", 0) if tp > 1 else 0
    if "RowParallelLinear" in kind:
        names, rows = [path], [held.all_rows(module.output_size)]
        matrix = held.row_parallel(path, f"{path}.weight", module.output_size, module.input_size, tp, rank)
    else:
        rows = _output_rows(module, kind, tp, rank)
        count = sum(row.count for row in rows)
        if len(names) == 1 < len(rows):  # published as one, as Phi-3's are
            rows, names = held.below_one_another(rows), names * len(rows)
        if len(rows) != len(names) or count != getattr(module, "output_size_per_partition", count):
            return  # composed irregularly
        matrix = held.stacked_rows(path, "weight", [f"{name}.weight" for name in names], rows, module.input_size)
    yield _stored(matrix, module, storage=_storage(module))
    if getattr(module, "bias", None) is not None:
        yield _stored(held.stacked_rows(path, "bias", [f"{name}.bias" for name in names], rows), module)


def _output_rows(module: Any, kind: set[str], tp: int, rank: int) -> list[Rows]:
    if "QKVParallelLinear" in kind:
        head_dim = module.head_size
        v_head_dim = getattr(module, "v_head_size", head_dim)
        return held.qkv_rows(module.total_num_heads, module.total_num_kv_heads, head_dim, v_head_dim, tp, rank)
    if "MergedColumnParallelLinear" in kind:
        return [held.equal_rows(size, tp, rank) for size in module.output_sizes]
    if "ColumnParallelLinear" in kind:
        return [held.equal_rows(module.output_size, tp, rank)]
    return [held.all_rows(module.output_size)]


def base_product(module: Any) -> Any:
    """Return a layer's product without adapters (`adapters.AddedProduct`); None: it has none for CPUs."""
    product = getattr(module, "cpu_linear", None)
    return getattr(product, "base", product)


def _storage(module: torch.nn.Module) -> Storage:
    product = base_product(module)
    # The plain fallback is a lambda around the live weight: it reads the parameter at each call.
    packed = product is not None and bool(getattr(product, "__closure__", None))
    return Storage.REPACKED if packed else Storage.PLAIN


def _block(path: str) -> str:
    return path.removesuffix(".routed_experts").removesuffix(".experts")


def _correction_bias(path: str, holder: Any, gate: str, derived: bool = False) -> Iterator[StoredMatrix]:
    """The expert score correction bias, as the gate, the experts and the router hold it: each must be up to date."""
    bias = getattr(holder, CORRECTION_BIAS, None)
    if isinstance(bias, torch.Tensor):
        tensor, rows = f"{gate}.{CORRECTION_BIAS}", held.all_rows(bias.shape[0])
        yield _stored(held.stacked_rows(path, CORRECTION_BIAS, [tensor], [rows]), holder, derived=derived)


def _sinks(path: str, module: Any) -> Iterator[StoredMatrix]:
    tp, rank = _tensor_parallel()
    matrix = held.stacked_rows(
        path, "sinks", [f"{path}.sinks"], [held.equal_rows(module.sinks.shape[0] * tp, tp, rank)]
    )
    yield _stored(matrix, module)
    kernel = getattr(getattr(module, "attn", None), "impl", None)
    if isinstance(getattr(kernel, "sinks", None), torch.Tensor):
        yield _stored(replace(matrix, path=f"{path}.attn.impl"), kernel, derived=True)


def _tensor_parallel() -> tuple[int, int]:
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    return get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()


def _latent_attention(path: str, module: Any, paths: dict[int, str]) -> Iterator[StoredMatrix]:
    tensor = f"{paths[id(module.kv_b_proj)]}.weight"
    if reason := _why_not_halved(module):
        yield _opaque(path, module, "W_UK_T", [tensor], reason, derived=True)
        return
    heads, keys, columns = module.W_UK_T.shape
    values = module.W_UV.shape[2]
    for matrix in held.latent_halves(path, tensor, heads, keys, values, columns, *_tensor_parallel()):
        yield _stored(matrix, module, derived=True, label=f"{path}.W_UK_T and W_UV")


def _why_not_halved(module: Any) -> str:
    """Return why the halves of kv_b are not copies of its elements; empty: they are."""
    if reason := compat.why_quantized(module.kv_b_proj):
        return f"is made from kv_b_proj, which {reason}"
    return "" if hasattr(module, "W_UK_T") and hasattr(module, "W_UV") else "is kept in an order of the kernel's own"


def _opaque(
    path: str, module: Any, parameter: str, tensors: list[str], reason: str, derived: bool = False
) -> StoredMatrix:
    parts = tuple(MatrixPart(name, (), (), 0, 0) for name in tensors)
    return StoredMatrix(path, parameter, parts, module=module, why_unknown=reason, derived=derived)


def _experts(path: str, module: Any) -> Iterator[StoredMatrix]:
    order, prefix, numbers = compat.expert_order(module), f"{_block(path)}.experts", compat.local_experts(module)
    stacked = bool(getattr(module, "w13_bias", None) is not None) and "GptOss" in type(module).__name__
    if order.reason:
        weight_name = next(
            (name for name, _ in module.named_parameters(recurse=False) if name != CORRECTION_BIAS), "weights"
        )
        yield _opaque(path, module, weight_name, _expert_tensors(prefix, module, numbers, stacked), order.reason)
        return
    sizes = compat.expert_sizes(module)
    for index, number in enumerate(numbers):
        if stacked:
            matrices = held.gpt_oss_expert(path, prefix, number, index, module.moe_config.num_experts, sizes)
        else:
            half, names = module.w13_weight.shape[1] // 2, compat.expert_names(module)
            matrices = held.expert(path, prefix, number, index, names, sizes, half, order.swapped)
        for matrix in matrices:
            permuted = order.isa and matrix.columns
            yield _stored(matrix, module, storage=Storage.PERMUTED if permuted else Storage.PLAIN, isa=order.isa)


def _expert_tensors(prefix: str, module: Any, numbers: list[int], stacked: bool) -> list[str]:
    if stacked:
        return [f"{prefix}.{name}{end}" for name in ("gate_up_proj", "down_proj") for end in ("", "_bias")]
    return [f"{prefix}.{number}.{name}.weight" for number in numbers for name in compat.expert_names(module)]
