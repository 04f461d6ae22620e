"""YAML as the configuration reads it: with the scalars of YAML 1.2, and without duplicate keys.

PyYAML follows YAML 1.1, where `off` is false and `1e-5` a text: it would change the meaning of `importance_correction:
off` and `lr: 1e-5`.
"""

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
VALUE_LIMIT = 10_000
"""Values of a document, its aliases written out; the recipes of NeMo-RL hold a few hundred."""
TEXT_LIMIT = 1 << 20
"""Characters of these values together."""


class Loader(yaml.SafeLoader):
    """Safe loader with the core schema of YAML 1.2 (section 10.3.2) that refuses a key given twice."""

    def get_single_data(self) -> Any:
        """Return what the document holds. Raises YAMLError also where its aliases stand for more than fits."""
        node = self.get_single_node()
        if node is None:
            return None
        require_size(node)
        try:
            return self.construct_document(node)
        except (ValueError, KeyError, TypeError) as error:  # `!!bool 3`
            raise refusal("a value does not have the form of its tag", node) from error


Loader.yaml_implicit_resolvers = {}  # without those of YAML 1.1
MERGE = "tag:yaml.org,2002:merge"
CORE_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map")}
Loader.yaml_constructors = {
    tag: build for tag, build in yaml.SafeLoader.yaml_constructors.items() if tag is None or tag in CORE_TAGS
}


def refusal(why: str, node: yaml.Node) -> yaml.YAMLError:
    """Return the error of a document that is refused for what begins at `node`."""
    return yaml.constructor.ConstructorError(None, None, why, node.start_mark)


def require_size(root: yaml.Node) -> None:
    """Raise YAMLError where the values of a document are too many or too long with its aliases written out, or one of
    them contains itself. Each node is counted once."""
    sizes: dict[int, tuple[int, int] | None] = {}

    def size(node: yaml.Node) -> tuple[int, int]:
        if isinstance(node, yaml.ScalarNode):
            return 1, len(node.value)
        if id(node) not in sizes:
            sizes[id(node)] = None  # it is being counted
            inner = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
            found = [size(part) for part in inner]
            sizes[id(node)] = 1 + sum(values for values, _ in found), sum(text for _, text in found)
        if (known := sizes[id(node)]) is None:
            raise refusal("a value contains itself", node)
        return known

    values, text = size(root)
    if values > VALUE_LIMIT or text > TEXT_LIMIT:
        raise refusal(f"it stands for more than {VALUE_LIMIT:,} values or {TEXT_LIMIT:,} characters", root)


def construct_mapping(loader: Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    own = [key for key, _ in node.value if key.tag != MERGE]  # these win over what `<<` merges in
    given = yaml.SafeLoader.construct_mapping(loader, node, deep=True)  # refuses keys that cannot be hashed
    keys = [loader.construct_object(key, deep=True) for key in own]
    if len(set(keys)) < len(keys):
        index = next(index for index, key in enumerate(keys) if key in keys[:index])
        first, again = own[keys.index(keys[index])].value, own[index].value
        why = f"the key {again} is given twice" if first == again else f"the keys {first} and {again} are the same key"
        raise refusal(why, own[index])
    return given


def construct_float(loader: Loader, node: yaml.ScalarNode) -> float:
    return float(loader.construct_scalar(node).lower().replace(".inf", "inf").replace(".nan", "nan"))


def construct_int(loader: Loader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node).replace("_", "")
    try:
        return int(text, 16 if text.startswith("0x") else 8 if text.startswith("0o") else 10)
    except ValueError as error:  # more digits than Python reads
        raise refusal(f"a number of {len(text)} digits", node) from error


RESOLVERS = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "merge": (r"<<", "<"),
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
Loader.add_constructor(MERGE, yaml.SafeLoader.construct_yaml_str)  # where it is no key


def parse_value(text: str) -> Any:
    """Return what `text` means in YAML (`8`, `1e-5`, `true`, `[a, b]`, `{k: v}`), or `text` where it is not YAML."""
    if len(text) > FILE_LIMIT_BYTES:
        return text
    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, RecursionError):
        return text


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """Return the top-level mapping of a YAML file; `what` names the file in errors ("--config", "preset"). Raises
    ConfigError when the file is absent, unreadable, not YAML, or not a mapping with text keys."""
    log.info("reading %s", path)
    text = read_text(path, what, FILE_LIMIT_BYTES)
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
