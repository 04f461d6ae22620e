"""The language models that the installed transformers builds, read from its source without importing it."""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path


@cache
def _classes(table: str) -> dict[str, str]:
    """Model type -> class; empty without transformers."""
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return {}
    text = (Path(spec.origin).parent / "models" / "auto" / "modeling_auto.py").read_text(encoding="utf-8")
    listed = text.partition(f"MODEL_FOR_{table}_MAPPING_NAMES")[2].partition("\n)")[0]
    return dict(re.findall(r'^ +\("([^"]+)", "(\w+)"\),', listed, re.MULTILINE))


def built_as(model_type: str, table: str = "CAUSAL_LM") -> str:
    """Return the class of a model type; empty: none. Remote code may differ in capitals (PhiMoEForCausalLM)."""
    return _classes(table).get(model_type, "")


def type_of(architecture: str) -> str:
    """Return the model type that is built as a class, a section for text before whole models; empty: none."""
    types = [name for name, built in _classes("CAUSAL_LM").items() if built == architecture]
    return max(types, key=lambda name: name.endswith("_text"), default="")


def why_not_built(architecture: str) -> str:
    """Return why transformers builds no model of a class, as a clause; empty: it does."""
    if find_spec("transformers") is None:
        return "transformers, which builds such models, is not installed"
    if type_of(architecture):
        return ""
    return f"the installed transformers {version('transformers')} has no such class"
