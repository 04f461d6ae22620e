"""Facts of a model, independent of engines: sizes, variants and tensors. Suffixes: H hidden, V vocabulary, E
experts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

RopeKind = Literal["default", "llama3", "yarn", "linear", "dynamic"]


@dataclass(frozen=True)
class RopeFacts:
    """Rotary position embedding. `scaling` has the published keys (`factor`, `low_freq_factor`, ...). `dynamic` equals
    `default` up to the model's length, which bounds rollouts."""

    theta: float = 10_000.0
    kind: RopeKind = "default"
    scaling: dict[str, float] = field(default_factory=dict, hash=False)
    interleaved: bool = False
    """Neighbors are rotated as a pair; else the two halves of what is rotated."""
    share: float = 1.0
    """Share of each head that is rotated, from its beginning on (transformers' `partial_rotary_factor`)."""

    def width(self, head_dim: int) -> int:
        """Elements of a head that are rotated."""
        return int(head_dim * self.share)

    @property
    def parameters(self) -> dict[str, Any]:
        """Itself in the form of transformers' configurations."""
        partial = {} if self.share == 1 else {"partial_rotary_factor": self.share}
        return {"rope_type": self.kind, "rope_theta": self.theta, **self.scaling, **partial}

    @property
    def attention_factor(self) -> float:
        """Factor of cosines and sines, only for yarn (transformers' `_compute_yarn_parameters`)."""
        scaling = self.scaling
        if self.kind != "yarn" or "attention_factor" in scaling:
            return scaling.get("attention_factor", 1.0) if self.kind == "yarn" else 1.0
        mscale, everywhere = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if mscale and everywhere:
            return self._mscale(mscale) / self._mscale(everywhere)
        return self._mscale(1.0)

    def _mscale(self, weight: float) -> float:
        factor = self.scaling["factor"]
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class MoeFacts:
    """Mixture-of-experts part of a model."""

    experts: int
    experts_per_token: int
    expert_intermediate: int
    shared_expert_intermediate: int = 0
    """Sum over the shared experts; 0: none."""
    dense_layers: tuple[int, ...] = ()
    """Layers (from 0) with a dense MLP."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize_topk: bool = True
    expert_bias: bool = False
    """Router correction bias that selects but does not weigh (DeepSeek-V3)."""
    groups: int = 1
    topk_groups: int = 1
    scaling: float = 1.0


@dataclass(frozen=True)
class MlaFacts:
    """Multi-head latent attention (DeepSeek-V3)."""

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class QuantizedBase:
    """Linear layers that are published as packed integers: weight = (code - zero point) * scale. They stay packed while
    adapters are trained (`models/quantized_base.py`)."""

    method: Literal["awq", "gptq", "pack-quantized", "bitsandbytes"]
    bits: int
    group: int
    """Weights of an output that share a scale; 0: all of them."""
    symmetric: bool = False
    """Zero points are 2 ** (bits - 1) and not stored."""
    left_out: tuple[str, ...] = ()
    """Linear layers that are not packed: parts of names, or with `pack-quantized` names and `re:` patterns."""
    double: bool = False
    """Scales are quantized too (bitsandbytes)."""


@dataclass(frozen=True)
class ListedTensor:
    """A published tensor of a model without a family file, or the box of it that one parameter holds."""

    name: str
    """With `{layer}` and `{expert}`, where it is there once a layer or an expert."""
    shape: tuple[int, ...]
    """The shape of the box."""
    layers: tuple[int, ...] = ()
    """The layers (from 0) with this tensor; empty: it is outside the layers."""
    module: str = ""
    """The parameter of transformers' modules that holds it, where that has another name."""
    role: str = ""
    """Its `Role` in `models/matrices.py`, if transformers reveals it."""
    dtype: str = ""
    """Published dtype of a stored, untrained tensor; empty: the model's."""
    tensor_shape: tuple[int, ...] = ()
    """The shape of the whole tensor, where that is more than the box."""
    tensor_start: tuple[int, ...] = ()
    """Where the box begins in the tensor; empty: at its beginning."""
    module_shape: tuple[int, ...] = ()
    """Shape of the parameter if larger than the box; experts have a leading axis."""
    module_start: tuple[int, ...] = ()
    """Where the box begins in the parameter, without the expert axis; empty: at 0."""


@dataclass(frozen=True)
class VisionFacts:
    """The part of a model that reads images, where the model is trained whole."""

    kind: str
    """The `model_type` in `models/vision.py`."""
    image_token: int
    """The token in whose places the embeddings of images stand."""
    hidden: int
    """Width of the tower's layers."""
    layers: int
    patch: int
    """Side of a patch in pixels."""
    merge: int
    """Patches of the tower per image token of the language part."""
    text_family: str
    """The family of the language part."""


@dataclass(frozen=True)
class ModelFacts:
    """Sizes and variants of a decoder-only language model, as its published configuration states them."""

    family: str
    """Its `models/` file, such as `llama`; without one the architecture."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the dense MLP."""
    vocab: int
    max_length: int
    tied_embeddings: bool = False
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    qk_norm: bool = False
    """Queries and keys have norms."""
    wide_qk_norm: bool = False
    """These norms are over all heads together, and not over each head."""
    activation: Literal["silu", "gelu_tanh", "quick_gelu"] = "silu"
    """The gate's; `quick_gelu` is x * sigmoid(1.702 x)."""
    glu_limit: float | None = None
    """The gate is cut off above it, the up-projection on both sides (gpt-oss)."""
    glu_offset: float = 0.0
    """Added to the up-projection before the product (gpt-oss: 1)."""
    attention_scale: float | None = None
    """Factor of query-key products; None: head_dim ** -0.5."""
    embedding_scale: float = 1.0
    """Factor of embeddings (Gemma: the root of the hidden size)."""
    residual_scale: float = 1.0
    """Factor of what attention and MLP add to the hidden states (Granite)."""
    logits_scale: float = 1.0
    """Logits are divided by it (Granite)."""
    rope: RopeFacts = RopeFacts()
    window_rope: RopeFacts | None = None
    """Rotary embedding of windowed layers; None: the other layers'."""
    moe: MoeFacts | None = None
    mla: MlaFacts | None = None
    sliding_window: int | None = None
    """Tokens that a windowed layer attends to; None: every layer attends to everything."""
    full_attention_layers: tuple[int, ...] | None = None
    """Layers (from 0) without the window; None: all."""
    mtp_layers: int = 0
    """Multi-token-prediction layers after the last one."""
    listed: tuple[ListedTensor, ...] = ()
    """Every tensor, for models without a `models/` file."""
    no_rope_layers: tuple[int, ...] = ()
    """Layers (from 0) without rotary embedding."""
    unpacked: str = ""
    """Why rollouts cannot be packed, as a clause about the model; each then is a padded row. Empty: they can."""
    takes_adapters: bool = True
    """Whether its layers hold linear layers of torch (GPT-2's hold none)."""
    vision: VisionFacts | None = None
    """Whether the model takes images, and all of it is trained; None: text only."""
    left_out: tuple[str, ...] = ()
    """Patterns of the names of stored tensors that are no part of the model, such as masks."""
    quantized: QuantizedBase | None = None
    """How linear layers are packed; None: weights are published as numbers."""

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, part.name) for part in fields(self)))

    def __hash__(self) -> int:
        return self._hash  # a plan's caches ask for it a million times

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_hash"}  # other processes have others

    @property
    def text_vocab(self) -> int:
        """Smallest image token; lower numbers are text."""
        return self.vocab if self.vision is None else self.vision.image_token // 2

    @property
    def never_sampled(self) -> tuple[int, ...]:
        """The image token. In a completion it would be read as an image."""
        return () if self.vision is None else (self.vision.image_token,)

    def is_windowed(self, layer: int) -> bool:
        return self.sliding_window is not None and layer not in (self.full_attention_layers or ())

    def is_moe_layer(self, layer: int) -> bool:
        return self.moe is not None and layer not in self.moe.dense_layers


def architectures(facts: Iterable[ModelFacts]) -> list[ModelFacts]:
    """Return the different ones of the facts of several models, in their order."""
    distinct = list[ModelFacts]()
    for each in facts:
        if each not in distinct:
            distinct.append(each)
    return distinct
