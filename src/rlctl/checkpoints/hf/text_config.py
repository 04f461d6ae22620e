"""The configuration of a multimodal model's text part. transformers names its class."""

from __future__ import annotations

import atexit
import copy
import json
import sys
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

from rlctl.checkpoints.hf.hf_files import copy_companions, read_config, read_object, refuse_quantized
from rlctl.checkpoints.hf.safetensors_files import INDEX, SINGLE, read_header, shard_files
from rlctl.config.files import temporary_folder
from rlctl.errors import InputError, first_line
from rlctl.models.families import sees
from rlctl.models.quantized_base import quantized_base
from rlctl.processes.child import call_in_child

SAME_TEXT = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Text sections without a class, and an equivalent model type: text tokens have equal time, height and width positions,
which makes rotary embeddings plain."""
OUTER = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config")
"""Keys that may stand around the text section, and mean the text."""
NO_TEXT = ("id2label", "label2id", "_name_or_path", "transformers_version")
"""Keys without meaning for the text model, or that change when another version extracts the text part again."""
OTHER_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Companions that speak of the other senses."""
TEMPLATES = ("chat_template.json", "processor_config.json")
"""Files of a processor that may hold the chat template, the first one first."""
HEAD = "lm_head.weight"
NEXT = "Name a text model, perhaps the one that it was made from."


def has_text_part(directory: Path) -> bool:
    """Return whether a model takes more than text and reads and writes with the same half."""
    config = read_config(directory)
    return sees(config) and not config.get("is_encoder_decoder")


def text_config(directory: Path) -> dict[str, Any]:
    """Return the config.json of a model's text part. Raises InputError if it cannot be trained."""
    refuse_quantized(directory)
    if (base := quantized_base(read_config(directory))) is not None:
        raise InputError(f"{directory}: packed weights ({base.method}) of a multimodal model are not read.", NEXT)
    names: set[str] = set()  # of the stored tensors, as far as an index or headers list them
    if (directory / INDEX).is_file() and not (directory / SINGLE).exists():
        names = {*(read_object(directory, INDEX).get("weight_map") or ())}
    elif any(directory.glob("*.safetensors")):
        names = {name for file in shard_files(directory) for name in read_header(file)}
    stores_head = any(name.endswith(HEAD) for name in names) if names else None
    return _text_config(directory, json.dumps(read_config(directory), sort_keys=True), stores_head)


def write_companions(source: Path, destination: Path, config: dict[str, Any]) -> None:
    """Write configuration, generation configuration, tokenizer and chat template of the text part of `source`."""
    copy_companions(source, destination)
    for name in OTHER_FILES:
        (destination / name).unlink(missing_ok=True)
    (destination / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    legacy = destination / TEMPLATES[0]
    legacy.unlink(missing_ok=True)
    tokenizer_config = (
        read_object(source, "tokenizer_config.json") if (source / "tokenizer_config.json").is_file() else {}
    )
    if tokenizer_config.get("chat_template") or any(destination.glob("chat_template*")):
        return
    for name in TEMPLATES:
        if (source / name).is_file() and isinstance(template := read_object(source, name).get("chat_template"), str):
            (destination / "chat_template.jinja").write_text(template)
            return


@cache
def _text_config(directory: Path, config: str, stores_head: bool | None) -> dict[str, Any]:
    if "torch" in sys.modules:
        return _made_config(json.loads(config), stores_head)
    doing = f"asking transformers about the text part of {directory}"
    return call_in_child(doing, partial(_made_config, json.loads(config), stores_head), quiet=True)


def _made_config(config: dict[str, Any], stores_head: bool | None) -> dict[str, Any]:
    """The config.json of the text part of a model with `config`."""
    import transformers
    from transformers import CONFIG_MAPPING

    kind = str(config.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise _refusal(config, f"transformers {transformers.__version__} knows no model type `{kind}`")
    try:
        whole = CONFIG_MAPPING[kind].from_dict(config)
        text = whole.get_text_config(decoder=True)
    except Exception as error:
        raise _refusal(config, f"transformers cannot read its config.json: {first_line(error)}") from error
    if text is whole:
        raise _refusal(config, "its config.json has no section for the text")
    if text.is_encoder_decoder:
        raise _refusal(config, "its text part is an encoder-decoder model")
    architecture, values = _of_class(config, text)
    text_section = config.get("text_config")
    section: dict[str, Any] = text_section if isinstance(text_section, dict) else config
    older = dict(text_section) if isinstance(text_section, dict) else {}  # such as `sliding_window_pattern` of Gemma 3
    values = {key: value for key, value in older.items() if not key.startswith("rope")} | values
    values |= {key: config[key] for key in OUTER if section.get(key) is None and config.get(key) is not None}
    dtype = section.get("dtype") or section.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    values |= {"architectures": [architecture], "dtype": dtype, "torch_dtype": dtype}
    values["tie_word_embeddings"] = _tied(config, section, stores_head, whole)
    values = _with_older_rope(values)
    return {key: value for key, value in sorted(values.items()) if key not in NO_TEXT}


def _of_class(config: dict[str, Any], text: Any) -> tuple[str, dict[str, Any]]:
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = SAME_TEXT.get(text.model_type, str(text.model_type))
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    if not isinstance(architecture, str) or sees({"architectures": [architecture]}):
        raise _refusal(config, f"transformers has no class that writes text for its text part (`{text.model_type}`)")
    values = json.loads(text.to_json_string(use_diff=False))
    if kind != text.model_type:
        rope = values.get("rope_parameters") or {}
        plain = {key: value for key, value in rope.items() if not key.startswith("mrope") and key != "type"}
        text_config = CONFIG_MAPPING[kind].from_dict(values | {"model_type": kind, "rope_parameters": plain})
        values = json.loads(text_config.to_json_string(use_diff=False))
    return architecture, values


def _with_older_rope(values: dict[str, Any]) -> dict[str, Any]:
    """Add the keys that transformers 4 and its users read rotary embeddings from: without `rope_theta` they take
    10,000. transformers 5.19 reads both forms; if the two forms would differ there, only its own is written."""
    from transformers import CONFIG_MAPPING

    rope = values.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_scaling" in values:
        return values
    by_layer = {key: value for key, value in rope.items() if isinstance(value, dict)}
    main = by_layer.get("full_attention", rope)
    scaling = {key: value for key, value in main.items() if key not in ("rope_theta", "partial_rotary_factor", "type")}
    kind = scaling.get("rope_type", "default")
    older = {
        "rope_theta": main.get("rope_theta"),
        "rope_local_base_freq": by_layer.get("sliding_attention", {}).get("rope_theta"),
        "partial_rotary_factor": main.get("partial_rotary_factor"),
        "rope_scaling": None if kind == "default" else scaling | {"type": kind},
    }
    both = values | {key: value for key, value in older.items() if value is not None}

    def read(values: dict[str, Any]) -> list[dict[str, Any]]:
        rope = CONFIG_MAPPING[str(values["model_type"])].from_dict(copy.deepcopy(values)).rope_parameters
        kinds = [rope.get(layer) or {} for layer in by_layer] or [rope]
        return [{key: value for key, value in kind.items() if key != "type"} for kind in kinds]

    try:
        return both if read(both) == read(values) else values
    except (KeyError, ValueError):  # transformers 5.19 refuses both forms together for Gemma 4's proportional kind
        return values


def _tied(config: dict[str, Any], section: dict[str, Any], stores_head: bool | None, whole: Any) -> bool:
    """Whether embedding and output layer are tied, by the model's configuration in or outside the text section, else by
    the files."""
    ties = {part["tie_word_embeddings"] for part in (config, section) if "tie_word_embeddings" in part}
    if len(ties) == 1:
        return bool(ties.pop())
    return bool(getattr(whole, "tie_word_embeddings", False)) if stores_head is None else not stores_head


def _refusal(config: dict[str, Any], reason: str) -> InputError:
    name = next(iter(config.get("architectures") or ()), str(config.get("model_type")))
    message = f"`{name}` is a model that takes images, sound or video, and its text part cannot be trained: {reason}."
    return InputError(message, NEXT)


@cache
def _companions(directory: Path, config: str) -> Path:
    folders = ExitStack()
    atexit.register(folders.close)
    folder = folders.enter_context(temporary_folder("text"))
    write_companions(directory, folder, json.loads(config))
    return folder


def text_directory(directory: Path) -> Path:
    """A folder with the configuration and the tokenizer of a model's text part, until this process ends."""
    return _companions(directory, json.dumps(text_config(directory)))
