"""Adapters of a PEFT directory by published tensor. Shapes: E experts, r rank, O outputs, I inputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from rlctl.checkpoints.hf.peft_files import EXPERT_PARAMETERS, INNER, LoraPair, PeftConfig, read_pairs, target_of
from rlctl.checkpoints.hf.transformers_model import body_path, meta_model, text_path
from rlctl.errors import InputError
from rlctl.models.facts import ModelFacts
from rlctl.weights.adapter_sites import places
from rlctl.weights.dtensor import module_layout
from rlctl.weights.layout import Piece, Shape, Span

_T = TypeVar("_T")


def adapters_of_tensors(
    config: PeftConfig,
    facts: ModelFacts,
    directory: Path,
    whole: Path | None = None,
    *,
    whole_modules: bool = False,
) -> dict[str, LoraPair]:
    """Return the adapters by published tensor of the base model in `directory`. `whole`: the multimodal model whose
    text part it is; `whole_modules`: tensors of modules_to_save are passed over. Raises InputError for modules that the
    base does not have, and for other shapes."""
    layout = module_layout(facts, "float32")
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for piece in layout.pieces:
        pieces[piece.param].append(piece)
    tensors = {piece.tensor: piece for piece in layout.pieces}
    transposed = {place.param for place in places(facts) if place.transposed}
    stored = read_pairs(config, whole_modules=whole_modules)
    if whole is not None:
        stored = _in_text(stored, directory, whole)
    pairs: dict[str, LoraPair] = {}
    for module, (a, b) in stored.items():
        target = target_of(module, stored, config)
        param = target if target in pieces else f"{target}.weight"
        if (expert := tensors.get(f"{module}.weight")) is not None and param not in pieces:  # as transformers 4 has it
            rows, columns = (span.count for span in expert.tensor_box)
            pairs[expert.tensor] = LoraPair(*_checked(config, target, a, b, (rows, columns)), config.scale_of(target))
            continue
        if param not in pieces:
            raise InputError(
                f"{config.label}: the base model in {directory} has no linear layer {target}.",
                f"They are adapters of {config.base}." if config.base else "Name the model that they were trained on.",
            )
        shape = layout.params[param].shape
        matrices = _checked(config, target, a, b, shape, transposed=param in transposed)
        pair = LoraPair(*matrices, config.scale_of(target))
        pairs |= {piece.tensor: pair for piece, pair in _divided(pair, pieces[param], shape)}
    return pairs


def module_of(target: str, targets: Collection[str]) -> str:
    """Return PEFT's module of a target, the inverse of `target_of`."""
    parent, _, name = target.rpartition(".")
    if name in EXPERT_PARAMETERS and parent.endswith(".experts"):
        first, second = (f"{parent}.{parameter}" in targets for parameter in EXPERT_PARAMETERS)
        return parent + (INNER if name == EXPERT_PARAMETERS[0] and first and second else "")
    return target.removesuffix(".weight")


def _checked(
    config: PeftConfig, target: str, a: Tensor, b: Tensor, shape: Shape, *, transposed: bool = False
) -> tuple[Tensor, Tensor]:
    """Return A [r, I] and B [O, r], or of experts [E, r, I] and [E, O, r], of a matrix or of stacked matrices
    (`transposed`: with inputs before outputs)."""
    rank, experts, inputs = config.rank_of(target), shape[0] if len(shape) > 2 else 1, prod(shape[-1:])
    outputs = prod(shape[:-1]) // experts
    inputs, outputs = (outputs, inputs) if transposed else (inputs, outputs)
    if (tuple(a.shape), tuple(b.shape)) != ((experts * rank, inputs), (outputs, experts * rank)):
        raise InputError(
            f"{config.label}: {target} has A {list(a.shape)} and B {list(b.shape)}; the base model and "
            f"rank {rank} take {[experts * rank, inputs]} and {[outputs, experts * rank]}.",
            f"They are adapters of {config.base}." if config.base else "Name the model that they were trained on.",
        )
    if len(shape) < 3:
        return a, b
    return a.view(experts, rank, inputs), b.view(outputs, rank, experts).permute(2, 0, 1)


def _divided(pair: LoraPair, pieces: list[Piece], shape: Shape) -> Iterator[tuple[Piece, LoraPair]]:
    """Yield the adapters of each published matrix in a parameter of transformers' modules."""
    for piece in pieces:
        a, b, box = pair.a, pair.b, piece.param_box
        if len(shape) > 2 and box[0].count == shape[0]:  # a published stack
            yield piece, pair
            continue
        if len(shape) > 2:
            expert, *part = (span.start for span in box[:-2])
            a, b = a[expert], b[expert].unflatten(0, shape[1:-1])
            b = b[part[0]] if part else b
        rows, columns = box[-2:]
        yield piece, LoraPair(a[:, _slice(columns)].contiguous(), b[_slice(rows)].contiguous(), pair.scale)


def _slice(span: Span) -> slice:
    return slice(span.start, span.last + 1, span.step)


def _in_text(stored: Mapping[str, _T], text: Path, whole: Path) -> dict[str, _T]:
    """Return modules of a multimodal model by their names in its text part. Raises InputError for other parts."""
    path_in_body, (path, _) = body_path(meta_model(text, None)), text_path(whole)
    renamed: dict[str, _T] = {}
    for module, pair in stored.items():
        if module.startswith(f"{path}."):
            module = f"{path_in_body}.{module.removeprefix(f'{path}.')}"
        elif not module.startswith(f"{path_in_body}."):
            raise InputError(
                f"{module} is outside of the text part of {whole}, which is trained.",
                "Merge the adapters with PEFT (merge_and_unload), and name the merged model as --model.",
            )
        renamed[module] = pair
    return renamed
