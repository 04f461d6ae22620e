"""Facts of the published models that people train most, so that planning needs no download and no gated access.

Values are those of each model's published `config.json`; where the model itself is at hand its own configuration wins.
A family without a file in `models/` can be planned for, but not trained.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from functools import cache

from rlctl.models.facts import MlaFacts, ModelFacts, MoeFacts, RopeFacts


@dataclass(frozen=True)
class CatalogEntry:
    """One set of facts and the hub names that it describes (the first is its own)."""

    names: tuple[str, ...]
    facts: ModelFacts


def lookup(name: str) -> ModelFacts | None:
    """Facts by hub name; case and organisation do not matter (`unsloth/Llama-3.1-8B` is Llama 3.1). None: unknown."""
    return _index().get(_key(name))


def canonical(name: str) -> str | None:
    """The catalog's own hub name for `name`; None: unknown."""
    return next((entry.names[0] for entry in ENTRIES if any(_key(name) == _key(n) for n in entry.names)), None)


def near(name: str, limit: int = 3) -> list[str]:
    """Known hub names that look like `name`, the likeliest first."""
    by_key = {_key(n): n for entry in ENTRIES for n in entry.names}
    return [by_key[k] for k in difflib.get_close_matches(_key(name), by_key, limit, 0.6)]


def _key(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1].lower().replace("_", "-")


@cache
def _index() -> dict[str, ModelFacts]:
    return {_key(name): entry.facts for entry in ENTRIES for name in entry.names}


def _names(stem: str, *suffixes: str) -> tuple[str, ...]:
    """Hub names of one size: `stem` with each suffix (the first is usually the empty one)."""
    return tuple(stem + suffix for suffix in suffixes)


def _llama(layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, **more: object) -> ModelFacts:
    base = ModelFacts("llama", layers, hidden, heads, kv, hidden // heads, ffn, vocab, 4096, norm_eps=1e-5)
    return replace(base, **more)


def _rope3(factor: float) -> RopeFacts:
    keys = {
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192.0,
    }
    return RopeFacts(500_000.0, "llama3", keys)


_ROPE_31, _ROPE_32 = _rope3(8.0), _rope3(32.0)
_LLAMA_8B = _llama(32, 4096, 32, 8, 14336, 128256, max_length=8192, rope=RopeFacts(500_000.0))
_LLAMA_70B = _llama(80, 8192, 64, 8, 28672, 128256, max_length=8192, rope=RopeFacts(500_000.0))
_LLAMA_31_8B = replace(_LLAMA_8B, max_length=131072, rope=_ROPE_31)
_LLAMA_31_70B = replace(_LLAMA_70B, max_length=131072, rope=_ROPE_31)

_LLAMA = (
    CatalogEntry(_names("meta-llama/Llama-2-7b", "-hf", "", "-chat-hf"), _llama(32, 4096, 32, 32, 11008, 32000)),
    CatalogEntry(_names("meta-llama/Llama-2-13b", "-hf", "", "-chat-hf"), _llama(40, 5120, 40, 40, 13824, 32000)),
    CatalogEntry(_names("meta-llama/Llama-2-70b", "-hf", "", "-chat-hf"), _llama(80, 8192, 64, 8, 28672, 32000)),
    CatalogEntry(
        (*_names("meta-llama/Meta-Llama-3-8B", "", "-Instruct"), *_names("meta-llama/Llama-3-8B", "", "-Instruct")),
        _LLAMA_8B,
    ),
    CatalogEntry(
        (*_names("meta-llama/Meta-Llama-3-70B", "", "-Instruct"), *_names("meta-llama/Llama-3-70B", "", "-Instruct")),
        _LLAMA_70B,
    ),
    CatalogEntry(
        (
            *_names("meta-llama/Llama-3.1-8B", "", "-Instruct"),
            *_names("meta-llama/Meta-Llama-3.1-8B", "", "-Instruct"),
            "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
        ),
        _LLAMA_31_8B,
    ),
    CatalogEntry(_names("allenai/Llama-3.1-Tulu-3-8B", "", "-SFT", "-DPO"), replace(_LLAMA_31_8B, vocab=128264)),
    CatalogEntry(
        (
            *_names("meta-llama/Llama-3.1-70B", "", "-Instruct"),
            *_names("meta-llama/Meta-Llama-3.1-70B", "", "-Instruct"),
            *_names("meta-llama/Llama-3.3-70B", "-Instruct", "", "-Instruct-FP8"),
            "deepseek-ai/DeepSeek-R1-Distill-Llama-70B",
        ),
        _LLAMA_31_70B,
    ),
    CatalogEntry(
        (
            *_names("meta-llama/Llama-3.1-405B", "", "-Instruct", "-FP8", "-Instruct-FP8"),
            *_names("meta-llama/Meta-Llama-3.1-405B", "", "-Instruct"),
        ),
        _llama(126, 16384, 128, 8, 53248, 128256, max_length=131072, rope=_ROPE_31),
    ),
    CatalogEntry(
        _names("meta-llama/Llama-3.2-1B", "", "-Instruct"),
        _llama(16, 2048, 32, 8, 8192, 128256, max_length=131072, rope=_ROPE_32, tied_embeddings=True),
    ),
    CatalogEntry(
        _names("meta-llama/Llama-3.2-3B", "", "-Instruct"),
        _llama(28, 3072, 24, 8, 8192, 128256, max_length=131072, rope=_ROPE_32, tied_embeddings=True),
    ),
    CatalogEntry(
        _names("HuggingFaceTB/SmolLM2-135M", "", "-Instruct"),
        _llama(30, 576, 9, 3, 1536, 49152, max_length=8192, rope=RopeFacts(100_000.0), tied_embeddings=True),
    ),
    CatalogEntry(
        _names("HuggingFaceTB/SmolLM2-360M", "", "-Instruct"),
        _llama(32, 960, 15, 5, 2560, 49152, max_length=8192, rope=RopeFacts(100_000.0), tied_embeddings=True),
    ),
    CatalogEntry(
        _names("HuggingFaceTB/SmolLM2-1.7B", "", "-Instruct"),
        _llama(24, 2048, 32, 32, 8192, 49152, max_length=8192, rope=RopeFacts(130_000.0), tied_embeddings=True),
    ),
    CatalogEntry(
        _names("deepseek-ai/deepseek-llm-7b", "-base", "-chat"),
        _llama(30, 4096, 32, 32, 11008, 102400, norm_eps=1e-6),
    ),
)


def _qwen2(layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int, **more: object) -> ModelFacts:
    base = ModelFacts("qwen2", layers, hidden, heads, kv, hidden // heads, ffn, vocab, 32768, qkv_bias=True)
    return replace(base, **({"rope": RopeFacts(1_000_000.0)} | more))


_QWEN25_1B5 = _qwen2(28, 1536, 12, 2, 8960, 151936, tied_embeddings=True)
_QWEN25_7B = _qwen2(28, 3584, 28, 4, 18944, 152064, max_length=131072)
_QWEN25_14B = _qwen2(48, 5120, 40, 8, 13824, 152064, max_length=131072)
_QWEN25_32B = _qwen2(64, 5120, 40, 8, 27648, 152064, max_length=131072)
_MATH = {"max_length": 4096, "rope": RopeFacts(10_000.0)}
_DISTILL = {"max_length": 131072, "rope": RopeFacts(10_000.0)}

_QWEN2 = (
    CatalogEntry(
        _names("Qwen/Qwen2.5-0.5B", "", "-Instruct"), _qwen2(24, 896, 14, 2, 4864, 151936, tied_embeddings=True)
    ),
    CatalogEntry((*_names("Qwen/Qwen2.5-1.5B", "", "-Instruct"), "Qwen/Qwen2.5-Coder-1.5B"), _QWEN25_1B5),
    CatalogEntry(_names("Qwen/Qwen2.5-Math-1.5B", "", "-Instruct"), replace(_QWEN25_1B5, **_MATH)),
    CatalogEntry(
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",), replace(_QWEN25_1B5, tied_embeddings=False, **_DISTILL)
    ),
    CatalogEntry(
        _names("Qwen/Qwen2.5-3B", "", "-Instruct"), _qwen2(36, 2048, 16, 2, 11008, 151936, tied_embeddings=True)
    ),
    CatalogEntry((*_names("Qwen/Qwen2.5-7B", "", "-Instruct"), "Qwen/Qwen2.5-Coder-7B-Instruct"), _QWEN25_7B),
    CatalogEntry(_names("Qwen/Qwen2.5-Math-7B", "", "-Instruct"), replace(_QWEN25_7B, **_MATH)),
    CatalogEntry(("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B",), replace(_QWEN25_7B, **_DISTILL)),
    CatalogEntry(
        (*_names("Qwen/Qwen2.5-14B", "", "-Instruct"), "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B"), _QWEN25_14B
    ),
    CatalogEntry(
        (
            *_names("Qwen/Qwen2.5-32B", "", "-Instruct"),
            "Qwen/QwQ-32B",
            "Qwen/Qwen2.5-Coder-32B-Instruct",
            "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B",
        ),
        _QWEN25_32B,
    ),
    CatalogEntry(
        _names("Qwen/Qwen2.5-72B", "", "-Instruct"), _qwen2(80, 8192, 64, 8, 29568, 152064, max_length=131072)
    ),
    CatalogEntry(
        _names("XiaomiMiMo/MiMo-7B", "-RL", "-Base", "-SFT"),
        replace(
            _qwen2(36, 4096, 32, 8, 11008, 151680),
            family="mimo",
            rope=RopeFacts(640_000.0),
            norm_eps=1e-5,
            mtp_layers=1,
        ),
    ),
    CatalogEntry(
        _names("ByteDance-Seed/Seed-OSS-36B", "-Base", "-Instruct"),
        replace(
            _qwen2(64, 5120, 80, 8, 27648, 155136, max_length=524288),
            family="seed_oss",
            head_dim=128,
            rope=RopeFacts(10_000_000.0),
        ),
    ),
)


def _qwen3(layers: int, hidden: int, heads: int, kv: int, ffn: int, **more: object) -> ModelFacts:
    base = ModelFacts("qwen3", layers, hidden, heads, kv, 128, ffn, 151936, 40960, qk_norm=True)
    return replace(base, **({"rope": RopeFacts(1_000_000.0)} | more))


def _qwen3_moe(layers: int, hidden: int, heads: int, kv: int, ffn: int, moe: MoeFacts, **more: object) -> ModelFacts:
    return _qwen3(layers, hidden, heads, kv, ffn, **({"family": "qwen3_moe", "moe": moe} | more))


_LONG = {"max_length": 262144, "rope": RopeFacts(5_000_000.0)}
_QWEN3_4B = _qwen3(36, 2560, 32, 8, 9728, tied_embeddings=True)
_QWEN3_30B = _qwen3_moe(48, 2048, 32, 4, 6144, MoeFacts(128, 8, 768))
_QWEN3_235B = _qwen3_moe(94, 4096, 64, 4, 12288, MoeFacts(128, 8, 1536))

_QWEN3 = (
    CatalogEntry(
        _names("Qwen/Qwen3-0.6B", "", "-Base", "-FP8"), _qwen3(28, 1024, 16, 8, 3072, tied_embeddings=True)
    ),
    CatalogEntry(
        _names("Qwen/Qwen3-1.7B", "", "-Base", "-FP8"), _qwen3(28, 2048, 16, 8, 6144, tied_embeddings=True)
    ),
    CatalogEntry(_names("Qwen/Qwen3-4B", "", "-Base", "-FP8"), _QWEN3_4B),
    CatalogEntry(_names("Qwen/Qwen3-4B", "-Instruct-2507", "-Thinking-2507"), replace(_QWEN3_4B, **_LONG)),
    CatalogEntry(_names("Qwen/Qwen3-8B", "", "-Base", "-FP8"), _qwen3(36, 4096, 32, 8, 12288)),
    CatalogEntry(_names("Qwen/Qwen3-14B", "", "-Base", "-FP8"), _qwen3(40, 5120, 40, 8, 17408)),
    CatalogEntry(_names("Qwen/Qwen3-32B", "", "-FP8"), _qwen3(64, 5120, 64, 8, 25600)),
    CatalogEntry(_names("Qwen/Qwen3-30B-A3B", "", "-Base", "-FP8", "-INT4"), _QWEN3_30B),
    CatalogEntry(
        (
            *_names("Qwen/Qwen3-30B-A3B", "-Instruct-2507", "-Thinking-2507", "-Instruct-2507-FP8"),
            "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        ),
        replace(_QWEN3_30B, **_LONG),
    ),
    CatalogEntry(_names("Qwen/Qwen3-235B-A22B", "", "-FP8", "-INT4"), _QWEN3_235B),
    CatalogEntry(
        _names("Qwen/Qwen3-235B-A22B", "-Instruct-2507", "-Thinking-2507", "-Instruct-2507-FP8"),
        replace(_QWEN3_235B, **_LONG),
    ),
    CatalogEntry(
        _names("Qwen/Qwen3-Coder-480B-A35B-Instruct", "", "-FP8"),
        _qwen3_moe(62, 6144, 96, 8, 8192, MoeFacts(160, 8, 2560), max_length=262144, rope=RopeFacts(10_000_000.0)),
    ),
    CatalogEntry(
        _names("allenai/OLMoE-1B-7B-0125", "", "-Instruct"),
        ModelFacts(
            "olmoe", 16, 2048, 16, 16, 128, 1024, 50304, 4096,
            norm_eps=1e-5, qk_norm=True, moe=MoeFacts(64, 8, 1024, normalize_topk=False),
        ),
    ),
)  # fmt: skip


def _deepseek(
    layers: int, hidden: int, heads: int, ffn: int, vocab: int, moe: MoeFacts, q_lora: int | None, **more: object
) -> ModelFacts:
    mla = MlaFacts(q_lora, 512, 128, 64, 128)
    head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    base = ModelFacts("deepseek_v3", layers, hidden, heads, heads, head_dim, ffn, vocab, 163840, moe=moe, mla=mla)
    return replace(base, **more)


def _deepseek_moe(experts: int, top: int, width: int, shared: int, dense: int, **more: object) -> MoeFacts:
    base = MoeFacts(experts, top, width, shared, tuple(range(dense)), score="sigmoid", expert_bias=True)
    return replace(base, **more)


_YARN_DS = {
    "factor": 40.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096.0,
}
_KIMI = _deepseek(
    61, 7168, 64, 18432, 163840, _deepseek_moe(384, 8, 2048, 2048, 1, scaling=2.827), 1536,
    max_length=131072, rope=RopeFacts(50_000.0, "yarn", _YARN_DS | {"factor": 32.0, "beta_fast": 1.0}, True),
)  # fmt: skip

_DEEPSEEK = (
    CatalogEntry(
        (
            *_names("deepseek-ai/DeepSeek-V3", "", "-Base", "-0324"),
            *_names("deepseek-ai/DeepSeek-V3.1", "", "-Base", "-Terminus"),
            *_names("deepseek-ai/DeepSeek-R1", "", "-Zero", "-0528"),
        ),
        _deepseek(
            61, 7168, 128, 18432, 129280,
            _deepseek_moe(256, 8, 2048, 2048, 3, groups=8, topk_groups=4, scaling=2.5), 1536,
            rope=RopeFacts(10_000.0, "yarn", _YARN_DS, True), mtp_layers=1,
        ),
    ),
    CatalogEntry(
        _names("moonshotai/Moonlight-16B-A3B", "", "-Instruct", "-Instruct-INT4"),
        _deepseek(
            27, 2048, 16, 11264, 163840, _deepseek_moe(64, 6, 1408, 2816, 1, scaling=2.446), None,
            max_length=8192, norm_eps=1e-5, rope=RopeFacts(50_000.0, interleaved=True),
        ),
    ),
    CatalogEntry(_names("moonshotai/Kimi-K2", "-Instruct", "-Base", "-Thinking", "-Thinking-fp8"), _KIMI),
)  # fmt: skip


def _mistral(layers: int, hidden: int, heads: int, ffn: int, vocab: int, **more: object) -> ModelFacts:
    base = ModelFacts("mistral", layers, hidden, heads, 8, 128, ffn, vocab, 32768, norm_eps=1e-5)
    return replace(base, **({"rope": RopeFacts(1_000_000.0)} | more))


def _mixtral(layers: int, hidden: int, heads: int, ffn: int, vocab: int, length: int) -> ModelFacts:
    return _mistral(layers, hidden, heads, ffn, vocab, family="mixtral", max_length=length, moe=MoeFacts(8, 2, ffn))


_MISTRAL_24B = _mistral(40, 5120, 32, 32768, 131072, rope=RopeFacts(100_000_000.0))

_MISTRAL = (
    CatalogEntry(
        _names("mistralai/Mistral-7B", "-v0.1", "-Instruct-v0.1"),
        _mistral(32, 4096, 32, 14336, 32000, rope=RopeFacts(10_000.0), sliding_window=4096, full_attention_layers=()),
    ),
    CatalogEntry(("mistralai/Mistral-7B-Instruct-v0.2",), _mistral(32, 4096, 32, 14336, 32000)),
    CatalogEntry(_names("mistralai/Mistral-7B", "-v0.3", "-Instruct-v0.3"), _mistral(32, 4096, 32, 14336, 32768)),
    CatalogEntry(
        _names("mistralai/Mistral-Nemo", "-Base-2407", "-Instruct-2407"),
        _mistral(40, 5120, 32, 14336, 131072, max_length=131072),
    ),
    CatalogEntry(_names("mistralai/Mistral-Small-24B", "-Base-2501", "-Instruct-2501"), _MISTRAL_24B),
    CatalogEntry(("mistralai/Mistral-Large-Instruct-2407",), _mistral(88, 12288, 96, 28672, 32768, max_length=131072)),
    CatalogEntry(
        _names("mistralai/Mixtral-8x7B", "-v0.1", "-Instruct-v0.1"), _mixtral(32, 4096, 32, 14336, 32000, 32768)
    ),
    CatalogEntry(("mistralai/Mixtral-8x22B-v0.1",), _mixtral(56, 6144, 48, 16384, 32000, 65536)),
    CatalogEntry(("mistralai/Mixtral-8x22B-Instruct-v0.1",), _mixtral(56, 6144, 48, 16384, 32768, 65536)),
)


def _gpt_oss(layers: int, experts: int) -> ModelFacts:
    yarn = {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096.0}
    yarn |= {"truncate": 0.0}
    return ModelFacts(
        "gpt_oss", layers, 2880, 64, 8, 64, 2880, 201088, 131072,
        norm_eps=1e-5, qkv_bias=True, rope=RopeFacts(150_000.0, "yarn", yarn), moe=MoeFacts(experts, 4, 2880),
        activation="quick_gelu", glu_limit=7.0, glu_offset=1.0,
        sliding_window=128, full_attention_layers=tuple(range(1, layers, 2)),
    )  # fmt: skip


def _gemma3(
    layers: int, hidden: int, heads: int, kv: int, head_dim: int, ffn: int, window: int, vocab: int
) -> ModelFacts:
    return ModelFacts(
        "gemma3", layers, hidden, heads, kv, head_dim, ffn, vocab, 131072 if window > 512 else 32768,
        tied_embeddings=True, qk_norm=True, activation="gelu_tanh", scaled_embeddings=True,
        attention_scale=(hidden // heads if layers == 62 else head_dim) ** -0.5,  # 27B: 168 for heads of 128
        rope=RopeFacts(1_000_000.0, "linear", {"factor": 8.0}) if window > 512 else RopeFacts(1_000_000.0),
        window_rope=RopeFacts(10_000.0),
        sliding_window=window, full_attention_layers=tuple(range(5, layers, 6)),
    )  # fmt: skip


_OPENAI_AND_GOOGLE = (
    CatalogEntry(("openai/gpt-oss-20b", "lmsys/gpt-oss-20b-bf16"), _gpt_oss(24, 32)),
    CatalogEntry(("openai/gpt-oss-120b", "lmsys/gpt-oss-120b-bf16"), _gpt_oss(36, 128)),
    CatalogEntry(_names("google/gemma-3-270m", "", "-it"), _gemma3(18, 640, 4, 1, 256, 2048, 512, 262144)),
    CatalogEntry(_names("google/gemma-3-1b", "-it", "-pt"), _gemma3(26, 1152, 4, 1, 256, 6912, 512, 262144)),
    CatalogEntry(_names("google/gemma-3-4b", "-it", "-pt"), _gemma3(34, 2560, 8, 4, 256, 10240, 1024, 262208)),
    CatalogEntry(_names("google/gemma-3-12b", "-it", "-pt"), _gemma3(48, 3840, 16, 8, 256, 15360, 1024, 262208)),
    CatalogEntry(_names("google/gemma-3-27b", "-it", "-pt"), _gemma3(62, 5376, 32, 16, 128, 21504, 1024, 262208)),
)


def _glm_moe(layers: int, hidden: int, ffn: int, moe: MoeFacts, qk_norm: bool) -> ModelFacts:
    return ModelFacts(
        "glm4_moe", layers, hidden, 96, 8, 128, ffn, 151552, 131072,
        norm_eps=1e-5, qkv_bias=True, qk_norm=qk_norm, rope=RopeFacts(1_000_000.0), moe=moe, mtp_layers=1,
    )  # fmt: skip


_OTHERS = (
    CatalogEntry(
        (*_names("zai-org/GLM-4", ".5", ".6", ".7", ".5-355B-A32B", ".7-355B-A32B"),),
        _glm_moe(92, 5120, 12288, _deepseek_moe(160, 8, 1536, 1536, 3, scaling=2.5), True),
    ),
    CatalogEntry(
        _names("zai-org/GLM-4.5-Air", "", "-Base"),
        _glm_moe(46, 4096, 10944, _deepseek_moe(128, 8, 1408, 1408, 1), False),
    ),
    CatalogEntry(
        ("zai-org/GLM-Z1-9B-0414", "zai-org/GLM-4-9B-0414"),
        ModelFacts("glm4", 40, 4096, 32, 2, 128, 13696, 151552, 32768, norm_eps=1e-5),
    ),
    CatalogEntry(
        ("MiniMaxAI/MiniMax-M2", "MiniMaxAI/MiniMax-M2.5"),
        ModelFacts(
            "minimax_m2", 62, 3072, 48, 8, 128, 8192, 200064, 196608, qk_norm=True, rope=RopeFacts(5_000_000.0),
            moe=_deepseek_moe(256, 8, 1536, 0, 0),
        ),
    ),
)  # fmt: skip

ENTRIES: tuple[CatalogEntry, ...] = (
    *_LLAMA,
    *_QWEN2,
    *_QWEN3,
    *_DEEPSEEK,
    *_MISTRAL,
    *_OPENAI_AND_GOOGLE,
    *_OTHERS,
)
