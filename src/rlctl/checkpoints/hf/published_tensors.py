"""The published tensors behind the parameters and stored buffers of a transformers model.

transformers saves the model. Parameters that change on saving (stacked experts, fused gate and up, fused convolutions)
are replaced by small tensors of codes that reveal the location of each box.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

from rlctl.checkpoints.hf.transformers_model import head_path, layers_path
from rlctl.errors import RlctlError
from rlctl.models.facts import ListedTensor
from rlctl.models.matrices import Role

if TYPE_CHECKING:
    from torch import Tensor

STACKS = {
    "gate_up_proj": (Role.EXPERT_GATE, Role.EXPERT_UP),
    "up_proj": (Role.EXPERT_UP,),
    "down_proj": (Role.EXPERT_DOWN,),
}
"""Stacked expert parameters, and each expert's published tensors in row order."""
BIAS = ("score_correction_bias", "expert_bias")
"""Suffixes of buffers that routers choose experts by: stored, and kept in float32."""
CODES = 1 << 27
"""The most elements that the codes of a parameter may have."""


class CannotFollowError(RlctlError):
    """It is not known how a parameter is published."""


def stored_buffers(inner: Any) -> dict[str, Tensor]:
    """Buffers that checkpoints hold, such as what routers add to choose experts by."""
    buffers = dict(inner.named_buffers())
    return {name: buffers[name] for name in inner.state_dict() if name in buffers}


def listed_tensors(inner: Any, dtypes: dict[str, str]) -> tuple[ListedTensor, ...]:
    """Return the published tensors; `dtypes`: stored buffers with other dtypes. Raises CannotFollowError with a clause
    about the model."""
    own_path = re.compile(rf"^{re.escape(layers_path(inner))}\.(\d+)\.")
    buffers, table = stored_buffers(inner), inner.get_input_embeddings()
    state = dict(inner.named_parameters()) | buffers
    names_by_id, saved = {id(value): name for name, value in state.items()}, as_published(inner, state)
    names = {
        names_by_id[id(value)]: name for name, value in saved.items() if id(value) in names_by_id
    }  # published as they are
    changed = state.keys() - names.keys()
    boxes = _boxes(inner, {name: state[name] for name in state if name in changed}, own_path, set(saved))
    roles = {f"{path}.weight": Role.EMBEDDING for path, module in inner.named_modules() if module is table}
    roles |= {f"{head_path(inner)}.weight": Role.HEAD}
    roles |= {name: Role.EXPERT_BIAS if name.endswith(BIAS) else Role.STORED for name in buffers}
    roles |= dict.fromkeys(_whole_stacks(inner) & names.keys(), Role.EXPERT_STACK)
    layers: dict[ListedTensor, list[int]] = {}
    for module, parameter in state.items():
        layer = _layer(module, own_path)
        path, role, dtype = _template(module, layer), str(roles.get(module, "")), dtypes.get(module, "")
        if module not in changed:
            name = _template(names[module], layer)
            tensors = [ListedTensor(name, tuple(parameter.shape), module="" if path == name else path)]
        else:
            tensors = boxes[path, tuple(parameter.shape)]
        for tensor in tensors:
            tensor = replace(tensor, role=tensor.role or role, dtype=dtype)
            layers.setdefault(tensor, []).extend([] if layer is None else [layer])
    return tuple(replace(tensor, layers=tuple(indices)) for tensor, indices in layers.items())


def _whole_stacks(inner: Any) -> set[str]:
    return {
        f"{path}.{name}"
        for path, module in inner.named_modules()
        if "top_k_index" in signature(type(module).forward).parameters
        for name, value in module.named_parameters(recurse=False)
        if value.shape[0] == getattr(module, "num_experts", None)
    }


def _layer(name: str, own_path: re.Pattern[str]) -> int | None:
    match = own_path.match(name)
    return int(match[1]) if match else None


def _template(name: str, layer: int | None) -> str:
    return name if layer is None else re.sub(rf"(^|\.){layer}(?=\.)", r"\1{layer}", name, count=1)


def as_published(inner: Any, values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return parameters under the names, and in the form, that transformers saves."""
    from transformers.core_model_loading import revert_weight_conversion

    try:
        return revert_weight_conversion(inner, dict(values))
    except Exception as error:
        reason = f"transformers cannot say how its tensors are published: {type(error).__name__}: {error}"
        raise CannotFollowError(reason.splitlines()[0]) from error


@dataclass(frozen=True)
class _Coded:
    """A parameter replaced by `codes`, which count from `base`. Axes that no operation divides are short."""

    name: str
    full: tuple[int, ...]
    base: int
    codes: Tensor


def _boxes(
    inner: Any, changed: dict[str, Tensor], own_path: re.Pattern[str], published: set[str]
) -> dict[tuple[str, tuple[int, ...]], list[ListedTensor]]:
    """(parameter with `{layer}`, shape) -> boxes of published tensors; one layer of each kind."""
    groups: dict[int | None, list[str]] = {}
    for name in changed:
        groups.setdefault(_layer(name, own_path), []).append(name)
    kinds: dict[Any, list[int | None]] = {}
    for layer, indices in groups.items():
        kinds.setdefault(
            frozenset((_template(name, layer), tuple(changed[name].shape)) for name in indices), []
        ).append(layer)
    by_box: dict[tuple[str, tuple[int, ...]], list[ListedTensor]] = {}
    for layers in kinds.values():
        first = layers[0]
        for name, boxes in _decoded(inner, {name: changed[name] for name in groups[first]}).items():
            tensors = [replace(box, name=_template(box.name, first), module=_template(name, first)) for box in boxes]
            indices = by_box.setdefault((_template(name, first), tuple(changed[name].shape)), [])
            indices += [tensor for tensor in dict.fromkeys(tensors) if tensor not in indices]
            missing = [
                box.name for box in indices for at in layers if box.name.format(layer=at, expert=0) not in published
            ]
            if missing:
                raise CannotFollowError(f"transformers publishes {missing[0]} otherwise in another layer")
    return by_box


def _decoded(inner: Any, parameters: dict[str, Tensor]) -> dict[str, list[ListedTensor]]:
    """Parameter -> the boxes of published tensors that it holds, by where they begin in it."""
    import torch
    from transformers.conversion_mapping import get_model_conversion_mapping

    changes = get_model_conversion_mapping(inner, add_legacy=False)
    operations = [operation for change in changes for operation in getattr(change, "operations", ())]
    divided = {axis for operation in operations if isinstance(axis := getattr(operation, "dim", None), int)}
    coded, base = list[_Coded](), 0
    for name, parameter in parameters.items():
        full = tuple(parameter.shape)
        shape = tuple(size if axis in divided else min(size, 2) for axis, size in enumerate(full))
        if prod(shape) > CODES:
            raise CannotFollowError(f"{name} is too large to be taken apart")
        coded.append(_Coded(name, full, base, base + torch.arange(prod(shape)).view(shape)))
        base += prod(shape)
    tensors: dict[str, list[ListedTensor]] = {coded_tensor.name: [] for coded_tensor in coded}
    for published, codes in as_published(
        inner, {coded_tensor.name: coded_tensor.codes for coded_tensor in coded}
    ).items():
        for coded_tensor, box in _parts(published, codes, coded):
            tensors[coded_tensor.name].append(box)
    for coded_tensor in coded:
        covered = sum(prod(box.shape) for box in tensors[coded_tensor.name])
        if covered != prod(coded_tensor.full):
            raise CannotFollowError(
                f"{covered} of the {prod(coded_tensor.full)} elements of {coded_tensor.name} are published"
            )
    return {name: _with_roles(name, _true_widths(name, boxes, inner)) for name, boxes in tensors.items()}


def _parts(published: str, codes: Tensor, coded: Sequence[_Coded]) -> Iterator[tuple[_Coded, ListedTensor]]:
    sides = [
        (codes >= coded_tensor.base) & (codes < coded_tensor.base + coded_tensor.codes.numel())
        for coded_tensor in coded
    ]
    present = [(coded_tensor, side) for coded_tensor, side in zip(coded, sides, strict=True) if side.any()]
    boxes = [(coded_tensor, _box(published, codes, side, coded_tensor)) for coded_tensor, side in present]
    ends = [[s + n for s, n in zip(box.tensor_start, box.shape, strict=True)] for _, box in boxes]
    whole = tuple(map(max, zip(*ends, strict=True)))
    for coded_tensor, box in boxes:
        alone = box.shape == whole
        yield (
            coded_tensor,
            replace(box, tensor_shape=() if alone else whole, tensor_start=() if alone else box.tensor_start),
        )


def _box(published: str, codes: Tensor, side: Tensor, coded_tensor: _Coded) -> ListedTensor:
    """Return a parameter's box among a published tensor's codes, from its corner codes; a leading expert axis may be
    absent."""
    import torch

    places = side.nonzero()
    low, high = places.amin(0).tolist(), places.amax(0).tolist()
    part_codes = codes[tuple(slice(a, b + 1) for a, b in zip(low, high, strict=True))]
    short = coded_tensor.codes.shape
    start, last = (
        [int(i) for i in torch.unravel_index(code - coded_tensor.base, short)]
        for code in (part_codes.reshape(-1)[0], part_codes.reshape(-1)[-1])
    )
    box = coded_tensor.codes[tuple(slice(a, b + 1) for a, b in zip(start, last, strict=True))]
    dropped = int(part_codes.dim() < box.dim())
    counts = [b - a + 1 for a, b in zip(start, last, strict=True)]
    divided = any(
        n != s for n, s, f in zip(counts, short, coded_tensor.full, strict=True) if s != f
    )  # a short axis is whole
    if divided or not torch.equal(box[0] if dropped and len(box) == 1 else box, part_codes):
        raise CannotFollowError(f"how {coded_tensor.name} is published cannot be followed")
    shape = [f if s != f else n for n, s, f in zip(counts, short, coded_tensor.full, strict=True)]
    name = published
    if dropped:
        name = re.sub(rf"\.experts\.{start[0]}\.", ".experts.{expert}.", published)
        if "{expert}" not in name:
            raise CannotFollowError(f"{coded_tensor.name} is published by parts that are no experts")
    whole, at = tuple(shape[dropped:]), tuple(start[dropped:])
    return ListedTensor(name, whole, tensor_start=tuple(low), module_shape=coded_tensor.full, module_start=at)


def _with_roles(name: str, boxes: list[ListedTensor]) -> list[ListedTensor]:
    """Return boxes by place; experts' once, with roles."""
    boxes = sorted(dict.fromkeys(boxes), key=lambda box: box.module_start)
    if not any("{expert}" in box.name for box in boxes):
        plain = {"module_shape": (), "module_start": ()}
        return [replace(box, **plain) if box.shape == box.module_shape else box for box in boxes]
    roles = STACKS.get(name.rpartition(".")[2], ())
    if len(roles) != len(boxes):
        raise CannotFollowError(f"it is not known which tensors of an expert {name} holds")
    return [replace(box, role=str(role)) for box, role in zip(boxes, roles, strict=True)]


def _true_widths(name: str, boxes: list[ListedTensor], inner: Any) -> list[ListedTensor]:
    """Correct boxes of fused convolutions, which transformers splits evenly, to the widths of their projections."""
    parts = sorted(boxes, key=lambda box: box.module_start)
    if len(parts) < 2 or any("{expert}" in box.name or box.tensor_shape for box in parts):
        return boxes
    parameters, parent = dict(inner.named_parameters()), name.rsplit(".", 2)[0]
    fronts = [f"{parent}.{box.name.split('.')[-2].partition('_')[0]}_proj.weight" for box in parts]
    if not all("_conv" in box.name and front in parameters for box, front in zip(parts, fronts, strict=True)):
        return boxes
    ends = [0]
    for front in fronts:
        ends.append(ends[-1] + parameters[front].shape[0])
    if ends[-1] != parts[0].module_shape[0]:
        return boxes
    return [
        replace(box, shape=(end - begin, *box.shape[1:]), module_start=(begin, *box.module_start[1:]))
        for box, (begin, end) in zip(parts, pairwise(ends), strict=True)
    ]
