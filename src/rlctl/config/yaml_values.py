"""YAML as the configuration reads it: with the scalars of YAML 1.2, and without duplicate keys.

PyYAML follows YAML 1.1, where `off` is false and `1e-5` a text: it would change the meaning of `importance_correction:
off` and `lr: 1e-5`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from rlctl.errors import ConfigError


class Loader(yaml.SafeLoader):
    """Safe loader with the core schema of YAML 1.2 (section 10.3.2) that refuses a key given twice."""


Loader.yaml_implicit_resolvers = {}  # without those of YAML 1.1


def construct_mapping(loader: Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
    for index, key in enumerate(keys):
        if key in keys[:index]:
            mark = node.value[index][0].start_mark
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is given twice", mark)
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


def construct_float(loader: Loader, node: yaml.ScalarNode) -> float:
    return float(loader.construct_scalar(node).lower().replace(".inf", "inf").replace(".nan", "nan"))


def construct_int(loader: Loader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node).replace("_", "")
    try:
        return int(text, 16 if text.startswith("0x") else 8 if text.startswith("0o") else 10)
    except ValueError as error:  # more digits than Python reads
        mark = node.start_mark
        raise yaml.constructor.ConstructorError(None, None, f"a number of {len(text)} digits", mark) from error


RESOLVERS = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "int": (r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+0123456789.",
    ),
}
for kind, (pattern, first) in RESOLVERS.items():
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(f"^(?:{pattern})$"), list(first))
Loader.add_constructor("tag:yaml.org,2002:map", construct_mapping)
Loader.add_constructor("tag:yaml.org,2002:int", construct_int)
Loader.add_constructor("tag:yaml.org,2002:float", construct_float)


def parse_value(text: str) -> Any:
    """Return what `text` means in YAML (`8`, `1e-5`, `true`, `[a, b]`, `{k: v}`), or `text` where it is not YAML."""
    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, RecursionError):
        return text


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """Return the top-level mapping of a YAML file; `what` names the file in errors ("--config", "preset"). Raises
    ConfigError when the file is absent, unreadable, not YAML, or not a mapping with text keys."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a UTF-8 text"
        raise ConfigError(f"{what} {path} cannot be read: {reason}.") from error
    try:
        value = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{what} {path} is not valid YAML: {explain(error)}.") from error
    except RecursionError as error:
        raise ConfigError(f"{what} {path} is nested too deeply to be a configuration.") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{what} {path} must hold sections of keys, not {type(value).__name__}.")
    return value


def explain(error: yaml.YAMLError) -> str:
    """Return problem and place of a YAML error in one line."""
    problem = getattr(error, "problem", None) or "it does not parse"
    mark = getattr(error, "problem_mark", None)
    return problem if mark is None else f"line {mark.line + 1}: {problem}"
