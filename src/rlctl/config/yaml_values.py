"""YAML 1.2 scalars without duplicate keys. PyYAML follows YAML 1.1, where `off` is false and `1e-5` a text, which
breaks `importance_correction: off` and `lr: 1e-5`. An unquoted `None`, as in Python, is null: as a text it would be a
system prompt, or the name of a file."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import yaml

from rlctl.config.files import read_text
from rlctl.errors import ConfigError

log = logging.getLogger(__name__)
FILE_LIMIT_BYTES = 1 << 18


class Loader(yaml.SafeLoader):
    """Safe loader with the core schema of YAML 1.2 (section 10.3.2) that refuses a key given twice."""


Loader.yaml_implicit_resolvers = {}  # without YAML 1.1's
MERGE = "tag:yaml.org,2002:merge"
CORE_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map")}
Loader.yaml_constructors = {
    tag: build for tag, build in yaml.SafeLoader.yaml_constructors.items() if tag is None or tag in CORE_TAGS
}
INVALID = (yaml.YAMLError, ValueError, KeyError, TypeError, RecursionError)
"""Errors of a document that is not YAML, or holds a value that its tag or Python does not take (`!!bool 3`)."""


def construct_mapping(loader: Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    explicit = [key for key, _ in node.value if key.tag != MERGE]  # these win over what `<<` merges in
    mapping = yaml.SafeLoader.construct_mapping(loader, node, deep=True)  # refuses keys that cannot be hashed
    seen: dict[Any, yaml.Node] = {}
    for key in explicit:
        first = seen.setdefault(loader.construct_object(key, deep=True), key)
        if first is not key:
            reason = f"the keys {first.value} and {key.value} are the same key"
            reason = f"the key {key.value} is given twice" if first.value == key.value else reason
            raise yaml.constructor.ConstructorError(None, None, reason, key.start_mark)
    return mapping


def construct_int(loader: Loader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node).replace("_", "")
    return int(text, 16 if text.startswith("0x") else 8 if text.startswith("0o") else 10)


RESOLVERS = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "merge": (r"<<", "<"),
    "null": (r"~|null|Null|NULL|None|", ["~", "n", "N", ""]),
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
Loader.add_constructor(MERGE, yaml.SafeLoader.construct_yaml_str)  # where it is not a key


def parse_value(text: str) -> Any:
    """Return what `text` means in YAML (`8`, `1e-5`, `true`, `[a, b]`, `{k: v}`), or `text` where it is not YAML."""
    if len(text) > FILE_LIMIT_BYTES:
        return text
    try:
        return yaml.load(text, Loader)
    except INVALID:
        return text


def read_mapping(path: Path, description: str) -> dict[str, Any]:
    """Return the top-level mapping of a YAML file; `what` names it in errors. Raises ConfigError if missing,
    unreadable, or not a mapping with text keys."""
    log.info("reading %s", path)
    text = read_text(path, description, FILE_LIMIT_BYTES)
    try:
        value = yaml.load(text, Loader)
    except INVALID as error:
        raise ConfigError(f"{description} {path} is not valid YAML: {explain(error)}.") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{description} {path} must hold sections of keys, not {type(value).__name__}.")
    return value


def explain(error: Exception) -> str:
    problem = getattr(error, "problem", None) or str(error).partition("\n")[0] or "it does not parse"
    mark = getattr(error, "problem_mark", None)
    return problem if mark is None else f"line {mark.line + 1}: {problem}"
