"""The transformers model of a configuration without memory: modules by role, head and buffers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlctl.models.vision import vision_family

if TYPE_CHECKING:
    from torch import Tensor

TOWER_ATTENTION = "sdpa"
"""Attention of the vision tower; each image is a sequence."""


def meta_model(
    directory: Path, attention: str | None, dtype: Any = None, *, headless: bool = False, buffers: bool = False
) -> Any:
    """Build a directory's transformers model without memory, `headless` without an output layer; `buffers` have values.
    `attention` None: the model's choice; `dtype` None: float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config: Any = copy.deepcopy(AutoConfig.from_pretrained(directory))
    if hasattr(config, "quantization_config"):  # modules are built for numbers; packed ones replace them
        del config.quantization_config
    config.tie_word_embeddings = getattr(config, "tie_word_embeddings", False) and not headless
    kind, chosen = AutoModelForCausalLM, attention
    if vision_family(config.to_dict()) is not None:
        kind = AutoModelForImageTextToText
        chosen = attention and {"text_config": attention, "vision_config": TOWER_ATTENTION}
    with _parameters_without_memory() if buffers else torch.device("meta"):
        inner = kind.from_config(config, dtype=dtype or torch.float32, attn_implementation=chosen)
    inner.tie_weights()
    if headless:
        parent, _, name = head_path(inner).rpartition(".")
        delattr(inner.get_submodule(parent), name)
    return inner


def text_path(directory: Path) -> tuple[str, Any]:
    """Return the path of the text part's body in a multimodal model of transformers, and the model, without memory."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory)
    kind: Any = getattr(transformers, next(iter(config.architectures or ()), ""), None)
    with torch.device("meta"):
        whole: Any = kind(config) if kind else transformers.AutoModelForImageTextToText.from_config(config)
    body = whole.get_decoder()
    body = getattr(body, "model", body)  # Llama 4's decoder has its output layer
    return next(path for path, module in whole.named_modules() if module is body), whole


def body_path(inner: Any) -> str:
    """Return the path of the module that computes the head's input; empty: none. Multimodal models: the language
    part."""
    family = vision_family(inner.config.to_dict())
    return family.language if family is not None else _below_head(inner)


def _below_head(inner: Any) -> str:
    prefix = next((name for name in (inner.base_model_prefix, "model") if name and hasattr(inner, name)), "")
    if not prefix:
        return ""
    forward = inspect.getsource(inspect.unwrap(type(inner).forward))
    return f"{prefix}.decoder" if f"self.{prefix}.decoder(" in forward else prefix


def layers_path(inner: Any) -> str:
    """Return the path of the layer list with the most parameters below the body; empty: none."""
    from torch import nn

    body, sizes = f"{body_path(inner)}.", dict[str, int]()
    for path, module in inner.named_modules():
        if isinstance(module, nn.ModuleList) and path.startswith(body):
            sizes[path] = sum(parameter.numel() for parameter in module.parameters())
    return max(sizes, key=sizes.__getitem__, default="")


def tower_layers(inner: Any) -> Any:
    """Return the vision tower's layer list; empty: none."""
    from torch import nn

    family = vision_family(inner.config.to_dict())
    inside = inner.get_submodule(family.tower).modules() if family is not None else ()
    lists = [module for module in inside if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda layers: sum(parameter.numel() for parameter in layers.parameters()), default=())


def layers_of(inner: Any) -> Any:
    return inner.get_submodule(layers_path(inner))


def head_path(inner: Any) -> str:
    """Return the output layer's path; empty: none."""
    head = inner.get_output_embeddings()
    return next((path for path, module in inner.named_modules() if module is head and path), "")


def head_of(inner: Any) -> Callable[[Tensor], Tensor]:
    """From last hidden states [U, H] to logits [U, V], including the model's scaling and capping."""
    from torch import nn
    from transformers.modeling_outputs import MoeModelOutputWithPast

    class Output(MoeModelOutputWithPast):
        """A model output with hidden states only."""

        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    path = _below_head(inner)
    body = inner.get_submodule(path)

    class Given(nn.Module):
        """Stands for the layers, and passes on its input and attributes."""

        hidden: Any = None

        def __getattr__(self, name: str) -> Any:
            return getattr(body, name)

        def forward(self, *_: Any, **__: Any) -> MoeModelOutputWithPast:
            return Output(last_hidden_state=self.hidden)

    inputs = Given()
    head = _with_module(inner, path.split("."), inputs)

    def logits(hidden_UH: Tensor) -> Tensor:
        inputs.hidden = hidden_UH[None]
        output = head(inputs_embeds=inputs.hidden, use_cache=False).logits[0]
        inputs.hidden = None
        return output

    return logits


def _with_module(module: Any, path: list[str], other: Any) -> Any:
    child = _with_module(module._modules[path[0]], path[1:], other) if path else other
    if not path:
        return child
    clone = copy.copy(module)
    clone._modules = {**module._modules, path[0]: child}
    return clone


def computed_buffers(inner: Any) -> dict[str, Tensor]:
    """Buffers that no checkpoint holds, such as rotary frequencies, by name."""
    stored = inner.state_dict().keys()
    return {name: buffer for name, buffer in inner.named_buffers() if name not in stored}


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Have modules that are built hold parameters without memory, and buffers with the values that they compute."""
    from torch import nn
    from transformers.initialization import no_init_weights

    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = on_meta
    try:
        with no_init_weights():
            yield
    finally:
        nn.Module.register_parameter = register
