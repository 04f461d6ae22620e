"""The model that transformers builds of a configuration, without memory for its weights: its modules by the part that
they play, its head as a function, and the buffers that no checkpoint holds."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


def meta_model(directory: Path, attention: str | None, dtype: Any = None, *, headless: bool = False) -> Any:
    """The transformers model of a directory's configuration, without memory for its tensors, and `headless` without an
    output layer. `attention` is transformers' name of the one to use; None: the model's own choice. `dtype` is that of
    its tensors; None: float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = copy.deepcopy(AutoConfig.from_pretrained(directory))
    config.tie_word_embeddings = getattr(config, "tie_word_embeddings", False) and not headless
    with torch.device("meta"):
        inner = AutoModelForCausalLM.from_config(config, dtype=dtype or torch.float32, attn_implementation=attention)
    if headless:
        parent, _, name = head_path(inner).rpartition(".")
        delattr(inner.get_submodule(parent), name)
    return inner


def body_path(inner: Any) -> str:
    """The path of the module that turns tokens into the hidden states that the head is given; empty: there is none."""
    prefix = next((name for name in (inner.base_model_prefix, "model") if name and hasattr(inner, name)), "")
    if not prefix:
        return ""
    forward = inspect.getsource(inspect.unwrap(type(inner).forward))
    return f"{prefix}.decoder" if f"self.{prefix}.decoder(" in forward else prefix


def layers_path(inner: Any) -> str:
    """The path of the list of layers, that with the most parameters below the body; empty: there is none."""
    from torch import nn

    body, sizes = f"{body_path(inner)}.", dict[str, int]()
    for path, module in inner.named_modules():
        if isinstance(module, nn.ModuleList) and path.startswith(body):
            sizes[path] = sum(parameter.numel() for parameter in module.parameters())
    return max(sizes, key=sizes.__getitem__, default="")


def layers_of(inner: Any) -> Any:
    """The list of layers."""
    return inner.get_submodule(layers_path(inner))


def head_path(inner: Any) -> str:
    """The path of the output layer; empty: there is none."""
    head = inner.get_output_embeddings()
    return next((path for path, module in inner.named_modules() if module is head and path), "")


def head_of(inner: Any) -> Callable[[Tensor], Tensor]:
    """From hidden states [U, H] of the last norm to logits [U, V]: whatever the model's own forward pass does behind
    its layers, such as scaling and capping."""
    from torch import nn
    from transformers.modeling_outputs import MoeModelOutputWithPast

    class Output(MoeModelOutputWithPast):
        """The output of the layers, of which all is absent but the hidden states."""

        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    path = body_path(inner)
    body = inner.get_submodule(path)

    class Given(nn.Module):
        """Stands where the layers are, and hands on what it is given. All that the head looks up there is theirs."""

        hidden: Any = None

        def __getattr__(self, name: str) -> Any:
            return getattr(body, name)

        def forward(self, *_: Any, **__: Any) -> MoeModelOutputWithPast:
            return Output(last_hidden_state=self.hidden)

    given = Given()
    head = _with_module(inner, path.split("."), given)

    def logits(hidden_UH: Tensor) -> Tensor:
        given.hidden = hidden_UH[None]
        found = head(inputs_embeds=given.hidden, use_cache=False).logits[0]
        given.hidden = None
        return found

    return logits


def _with_module(module: Any, path: list[str], other: Any) -> Any:
    """A shallow copy of a module that has `other` at a path."""
    own = _with_module(module._modules[path[0]], path[1:], other) if path else other
    if not path:
        return own
    found = copy.copy(module)
    found._modules = {**module._modules, path[0]: own}
    return found


def fill_buffers(inner: Any) -> None:
    """Compute buffers that no checkpoint holds, such as rotary frequencies, of which a model that was built without
    memory has no values. Raises InputError for one that transformers cannot compute anew."""
    import torch

    stored = inner.state_dict().keys()
    computed = {name: buffer for name, buffer in inner.named_buffers() if name not in stored}
    truths = {name: buffer for name, buffer in computed.items() if buffer.dtype == torch.bool}
    with torch.no_grad():
        for buffer in computed.values():
            buffer.fill_(_no_value(buffer))  # so that one which transformers leaves out is found
        _compute_buffers(inner)
        if _unset(computed, truths):
            body = inner.get_submodule(body_path(inner))
            (body if hasattr(body, "_init_weights") else inner)._init_weights(body)  # Falcon-H1's layers, Gemma 3n's
        for path in sorted({name.rpartition(".")[0] for name in _unset(computed, truths)}):
            _model_around(inner, path)._init_weights(inner.get_submodule(path))  # Gemma 3n's AltUp, its weights too
        first = {name: buffer.clone() for name, buffer in truths.items()}
        for buffer in truths.values():  # no truth value says that there is none: one that was set is set again
            buffer.logical_not_()
        if truths:
            _compute_buffers(inner)
    for name, buffer in computed.items():
        unset = buffer != first[name] if name in first else _is_unset(buffer)
        if unset.any():
            why = f"training.backend = dtensor: transformers does not say how to compute {name} of this model."
            raise InputError(why, "Use --backend megatron, if the family of the model has a file in src/rlctl/models.")


def _compute_buffers(inner: Any) -> None:
    """Have the innermost model around each module compute its buffers: some need what that model alone knows."""
    for path, module in inner.named_modules():
        if not list(module.buffers(recurse=False)):
            continue
        if not list(module.parameters(recurse=False)):
            _model_around(inner, path)._init_weights(module)
        elif hasattr(module, "embed_scale"):  # Gemma's embedding
            module.embed_scale.fill_(module.scalar_embed_scale)


def _model_around(inner: Any, path: str) -> Any:
    """The innermost model around a module, which knows how to compute what it holds."""
    around = [module for name, module in inner.named_modules() if f"{path}.".startswith(f"{name}." if name else "")]
    return next(module for module in reversed(around) if hasattr(module, "_init_weights"))


def _unset(computed: dict[str, Tensor], truths: dict[str, Tensor]) -> list[str]:
    """Names of buffers without a value, as far as their values tell."""
    return [name for name, buffer in computed.items() if name not in truths and _is_unset(buffer).any()]


def _no_value(buffer: Tensor) -> float:
    """A number that stands for none in a buffer: the largest where whole numbers are in it (0 may be meant)."""
    import torch

    whole = not (buffer.is_floating_point() or buffer.is_complex() or buffer.dtype == torch.bool)
    return torch.iinfo(buffer.dtype).max if whole else torch.nan


def _is_unset(buffer: Tensor) -> Tensor:
    number = _no_value(buffer)
    return buffer.isnan() if number != number else buffer == number
