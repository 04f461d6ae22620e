"""Descriptions of keys are read from the docstrings below them when help or a schema shows them."""

from __future__ import annotations

import subprocess
import sys

from pydantic import BaseModel, ConfigDict, Field

from rlctl.config.section import Section
from rlctl.methods.configuration import schema


class Wood(Section):
    hardness: float = 1.0
    """By Brinell,
    in MPa."""
    age: int = 0
    color: str = "brown"
    """Of the bark."""


class Oak(Wood):
    color: str = "grey"
    acorns: int = Field(0, description="A year.")
    """Not this."""


class Forest(Section):
    oak: Oak = Oak()
    """The oldest tree."""


def test_a_subclass_keeps_and_replaces_descriptions() -> None:
    assert Wood.meanings() == {"hardness": "By Brinell,\nin MPa.", "color": "Of the bark."}
    assert Oak.meanings() == {"hardness": "By Brinell,\nin MPa.", "acorns": "A year."}


def test_a_json_schema_has_the_descriptions() -> None:
    made = Forest.model_json_schema()
    assert made["properties"]["oak"]["description"] == "The oldest tree."
    described = {name: value.get("description") for name, value in made["$defs"]["Oak"]["properties"].items()}
    assert described == {"hardness": "By Brinell,\nin MPa.", "age": None, "color": None, "acorns": "A year."}


def test_they_are_those_that_pydantic_reads() -> None:
    """`use_attribute_docstrings`, on the source of a section with many keys."""
    (section,) = (one for one in schema().sections["run"] if one.__name__ == "RunConfig")
    source = f"import sys; sys.path.insert(0, ''); from {section.__module__} import {section.__name__} as section\n"
    source = (
        "from pydantic._internal._docs_extraction import extract_docstrings_from_cls\n"
        f"{source}print(extract_docstrings_from_cls(section, use_inspect=True) == section.meanings())"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"]


def test_a_class_without_source_has_none() -> None:
    made = type("Made", (Section,), {"__annotations__": {"size": int}, "size": 1, "__module__": "nowhere"})
    assert issubclass(made, BaseModel)
    assert issubclass(made, Section)
    assert made.meanings() == {}
    assert made.model_config == ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)
