"""transformers' model as the reference: one pass over some sequences, and each sub-layer again on given inputs.

A sub-layer is a chain of modules between two sums of the hidden states: attention or an MLP with the norms before and
after it. The chains are found in a pass, so models need no table here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlctl.backends.hidden_states import LOGITS, NORM, entering, given_states, layer_point, leaving
from rlctl.checkpoints.hf.transformers_model import body_path, head_of, layers_path
from rlctl.errors import InputError
from rlctl.models.vision import vision_family
from rlctl.settings.training import Rounding
from rlctl.weights.rounding import narrowed

EMBEDDING = "embedding"
ATTENTION, MLP = "attention", "mlp"
KINDS = {ATTENTION: ("attn", "attention"), MLP: ("mlp", "moe", "feed_forward", "ffn")}
"""Parts of modules' names by the kind of sub-layer."""
SUMMED = 1e-5
"""Largest relative difference of a sum of hidden states from the next ones, in float32."""
NORMS = ("Norm", "Dropout", "Identity")
"""Parts of class names of modules that belong to the sub-layer before or after them."""


@dataclass
class Call:
    """The arguments of a module in the reference's pass, without the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    at: int | str
    """Place of the hidden states among them."""

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        hidden = entering(args, kwargs)
        at = next(place for place, value in (*enumerate(args), *kwargs.items()) if value is hidden)
        return cls(args, dict(kwargs), at)

    def __call__(self, module: nn.Module, hidden_1TH: Tensor) -> Any:
        args, kwargs = list(self.args), dict(self.kwargs)
        (args if isinstance(self.at, int) else kwargs)[self.at] = hidden_1TH  # type: ignore[index]
        return module(*args, **kwargs)

    def to(self, dtype: torch.dtype) -> Call:
        return Call(_cast(self.args, dtype), _cast(self.kwargs, dtype), self.at)


@dataclass
class SubLayer:
    """A chain of modules, with the arguments of each for each sequence. A copy may be changed (`causes.py`)."""

    modules: dict[str, nn.Module]
    """By their paths in the model, in the order of the chain."""
    calls: list[list[Call]]
    """[sequence][module]"""
    config: Any
    """transformers' configuration of the model's text part."""
    others: dict[str, SubLayer] = field(default_factory=dict)
    """Sub-layers of other layers with the same modules, by a name for messages."""

    def outputs(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """[T, H] for each sequence, in the dtype of the modules."""
        outputs = []
        with torch.no_grad():
            for input_TH, calls in zip(inputs, self.calls, strict=True):
                dtype = _dtype(self.modules.values(), input_TH.dtype)
                hidden_1TH = input_TH.to(dtype)[None]
                for module, call in zip(self.modules.values(), calls, strict=True):
                    hidden_1TH = leaving(call(module, hidden_1TH))
                outputs.append(hidden_1TH.reshape(len(input_TH), -1))
        return outputs

    def copied(self, dtype: torch.dtype) -> SubLayer:
        modules = {path: copy.deepcopy(module).to(dtype) for path, module in self.modules.items()}
        calls = [[call.to(dtype) for call in of_sequence] for of_sequence in self.calls]
        return SubLayer(modules, calls, self.config, self.others)


class Reference:
    """The model, and what its pass over the sequences has shown."""

    def __init__(self, model: Any, sequences: Sequence[Sequence[int]]) -> None:
        """`model`: with weights and eager attention, in float32."""
        self.model, self.sequences = model.eval(), [list(sequence) for sequence in sequences]
        self.sublayers: dict[str, SubLayer] = {}
        self.streams: dict[str, list[Tensor]] = {}
        """Point -> the hidden states that enter it, one [T, H] for each sequence, in float32."""
        self.logits: list[Tensor] = []
        """[T, V] for each sequence."""
        self._trace()

    @property
    def config(self) -> Any:
        return self.model.config.get_text_config()

    @property
    def points(self) -> list[str]:
        """The points in the order of the pass."""
        return [EMBEDDING, *self.sublayers, LOGITS]

    def paths(self) -> dict[str, tuple[str, str]]:
        """Return the first and last module of each sub-layer, for recording in other programs."""
        chains = {point: list(sublayer.modules) for point, sublayer in self.sublayers.items()}
        return {point: (chain[0], chain[-1]) for point, chain in chains.items()}

    def following(self, point: str) -> str | None:
        """Return the sub-layer or last norm after a layer's sub-layer; None: there is none."""
        points = list(self.sublayers)
        place = points.index(point) + 1 if point in points else len(points)
        return points[place] if place < len(points) else None

    def added(self, point: str) -> float | None:
        """Return the factor with which a sub-layer's output is added to its input before the next one; None: something
        else enters that, as where attention and MLP are parallel."""
        following = self.following(point)
        assert following is not None  # only sub-layers before another
        before, after = (torch.cat(self.streams[at]).double() for at in (point, following))
        output = torch.cat(self.sublayers[point].outputs(self.streams[point])).double()
        factor = float(((after - before) * output).sum() / output.square().sum())
        left = (before + factor * output - after).norm() / after.norm()
        return factor if left < SUMMED else None

    def remember(self, name: str, earlier: Reference) -> None:
        """Let a sub-layer with the weights of an `earlier` version of the model be recognized, under that name."""
        for point, sublayer in self.sublayers.items():
            sublayer.others = {name: earlier.sublayers[point]} | sublayer.others

    def embedded(self) -> list[Tensor]:
        return self.streams[next(iter(self.sublayers))]

    def head(self, dtype: torch.dtype, change: Callable[[Any], None] = lambda head: None) -> Callable[[Tensor], Tensor]:
        """Return the function from normed hidden states [U, H] to logits [U, V], computed in `dtype`; `change` is
        called with a copy of the output layer."""
        plain = self.model.get_output_embeddings()
        head = copy.deepcopy(plain).to(dtype)
        change(head)
        self.model.set_output_embeddings(head)
        try:
            logits = head_of(self.model)
        finally:
            self.model.set_output_embeddings(plain)

        def computed(hidden_UH: Tensor) -> Tensor:
            with torch.no_grad():
                return logits(hidden_UH.to(dtype))

        return computed

    def _trace(self) -> None:
        recorder = _Recorder(self.model)
        with recorder.attached(), torch.no_grad():
            for sequence in self.sequences:
                output = self.model(input_ids=torch.tensor([sequence]), use_cache=False)
                self.logits.append(output.logits[0])
                recorder.end_sequence()
        for point, chain in recorder.chains():
            first = next(iter(chain))
            self.sublayers[point] = SubLayer(
                {path: self.model.get_submodule(path) for path in chain},
                [[Call.of(*of_sequence[path][:2]) for path in chain] for of_sequence in recorder.sequences],
                self.config,
            )
            entered = [entering(*of_sequence[first][:2]) for of_sequence in recorder.sequences]
            self.streams[point] = [hidden.reshape(-1, hidden.shape[-1]) for hidden in entered]
        if not any(point.startswith("layers.") for point in self.sublayers):
            kind = type(self.model).__name__
            reason = f"{kind} has no layer whose attention or MLP can be computed alone, from one input"
            raise InputError(f"{reason}.", "`rlctl refit-test` compares tensors and log-probs.")
        for point, sublayer in self.sublayers.items():
            sublayer.others = dict(self._alike(point))

    def _alike(self, point: str) -> Iterator[tuple[str, SubLayer]]:
        """The neighbors' sub-layers, whose weights may have come to this one."""
        if not point.startswith("layers."):
            return
        _, number, kind = point.split(".", 2)
        for other in (int(number) - 1, int(number) + 1):
            if (neighbor := self.sublayers.get(layer_point(other, kind))) is not None:
                yield f"layer {other}", neighbor


def load_reference(
    directory: Path, sequences: Sequence[Sequence[int]], dtype: torch.dtype, rounding: Rounding = "unbiased"
) -> Reference:
    """Load a published model in float32 with its weights rounded to `dtype` as a trainer rounds them, and run it."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    config = AutoConfig.from_pretrained(directory)
    kind = AutoModelForCausalLM if vision_family(config.to_dict()) is None else AutoModelForImageTextToText
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = kind.from_pretrained(directory, dtype=torch.float32, **options)
    if shown:
        logging.enable_progress_bar()
    with torch.no_grad():
        for parameter in {id(value): value for value in model.parameters()}.values():
            parameter.copy_(narrowed(parameter, dtype, rounding))
    return Reference(model, sequences)


class _Recorder:
    """The calls of the layers' children, and of the modules between the layers and the head."""

    def __init__(self, model: Any) -> None:
        self.body, self.layers = body_path(model), layers_path(model)
        self.model, self.layer_modules = model, model.get_submodule(self.layers)
        body = model.get_submodule(self.body) if self.body else model
        self.after = [f"{self.body}.{name}" for name, module in body.named_children() if _is_norm(module)]
        self.sequences: list[dict[str, tuple[Any, ...]]] = [{}]
        """For each sequence: path -> (args, kwargs, output, calls so far), in the order of the calls."""

    @contextmanager
    def attached(self) -> Iterator[None]:
        paths = [
            f"{self.layers}.{number}.{name}"
            for number, layer in enumerate(self.layer_modules)
            for name, _ in layer.named_children()
        ]
        with ExitStack() as stack:
            for path in (*paths, *self.after):
                hook = self.model.get_submodule(path).register_forward_hook(self._hook(path), with_kwargs=True)
                stack.callback(hook.remove)
            yield

    def _hook(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            calls = self.sequences[-1]
            calls[path] = (args, kwargs, leaving(output), calls[path][3] + 1 if path in calls else 1)

        return hook

    def end_sequence(self) -> None:
        self.sequences.append({})

    def chains(self) -> Iterator[tuple[str, list[str]]]:
        """Yield (point, paths of the chain) in order. Modules that a pass calls several times have no point."""
        self.sequences.pop()
        calls = {path: call for path, call in self.sequences[0].items() if call[3] == 1}
        for number in range(len(self.layer_modules)):
            prefix, seen = f"{self.layers}.{number}.", set[str]()
            of_layer = {path: call for path, call in calls.items() if path.startswith(prefix)}
            for chain, main in _chains(of_layer, self.model):
                kind = _kind(main.removeprefix(prefix))
                kind = main.removeprefix(prefix) if kind in seen else kind
                seen.add(kind)
                yield layer_point(number, kind), chain
        last = [path for path in calls if path in self.after]
        if last:
            yield NORM, last[-1:]


def _chains(calls: Mapping[str, tuple[Any, ...]], model: Any) -> Iterator[tuple[list[str], str]]:
    """Yield the chain of each module that is no norm, and the module. A call whose input is another's output follows
    it."""
    parents: dict[str, str | None] = {}
    earlier: list[str] = []
    for path, (args, kwargs, _, _) in calls.items():
        try:
            hidden, *others = given_states(args, kwargs)
        except ValueError:  # as in a rotary embedding of a layer
            continue
        if any(other.shape == hidden.shape for other in others):  # Bloom's modules also get what they add to
            continue
        parents[path] = next((other for other in reversed(earlier) if calls[other][2] is hidden), None)
        earlier.append(path)
    for path in earlier:
        if _is_norm(model.get_submodule(path)):
            continue
        chain, at = [path], parents[path]
        while at is not None and _is_norm(model.get_submodule(at)):
            chain.insert(0, at)
            at = parents[at]
        while followers := [other for other in earlier if parents[other] == chain[-1]]:
            if len(followers) > 1 or not _is_norm(model.get_submodule(followers[0])):
                break
            chain.append(followers[0])
        yield chain, path


def _is_norm(module: nn.Module) -> bool:
    return any(word in type(module).__name__ for word in NORMS)


def _kind(name: str) -> str:
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), name)


def _dtype(modules: Any, usual: torch.dtype) -> torch.dtype:
    for module in modules:
        for parameter in module.parameters():
            if parameter.is_floating_point():
                return parameter.dtype
    return usual


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(_cast(part, dtype) for part in value)
    if isinstance(value, dict):
        return {key: _cast(part, dtype) for key, part in value.items()}
    return value
