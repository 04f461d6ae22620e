"""The base of every configuration section, and the types of its numbers and paths."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from rlctl.config.files import user_path

if TYPE_CHECKING:
    from pydantic import GetJsonSchemaHandler
    from pydantic_core import CoreSchema

MOST = 2**31 - 1
Positive = Annotated[int, Field(gt=0, le=MOST)]
NonNegative = Annotated[int, Field(ge=0, le=MOST)]
Threads = Annotated[int, Field(gt=0, le=4096)]
Bytes = Annotated[int, Field(gt=0, le=2**50)]
Seconds = Annotated[float, Field(gt=0, le=1_000_000)]
"""A time limit. The system calls that wait take no more than 24 days."""
PositiveNumber = Annotated[float, Field(gt=0)]
NonNegativeNumber = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(gt=0, lt=1)]
"""A proper fraction: above 0, below 1."""
PathText = Annotated[str, AfterValidator(lambda text: str(user_path(text)) if text.startswith("~") else text)]
"""A path, or something else that does not begin with `~`. The shell expands that in no file and in no `--set`."""


class Section(BaseModel):
    """A part of the configuration. It is immutable and refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @classmethod
    def meanings(cls) -> dict[str, str]:
        """Return the description of each key that has one: the docstring below its field."""
        # pydantic's `use_attribute_docstrings` reads the source of every class when it is defined, a fifth of the
        # processor time of `rlctl plan`. Only help and schemas need it.
        descriptions = dict[str, str]()
        for base in reversed(cls.__mro__):
            if issubclass(base, Section):
                docstrings = _docstrings(base)
                for name in inspect.get_annotations(base):
                    descriptions.pop(name, None)
                    if name in docstrings:
                        descriptions[name] = docstrings[name]
        return descriptions | {name: field.description for name, field in cls.model_fields.items() if field.description}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, meaning in cls.meanings().items():
            if name in properties:
                properties[name].setdefault("description", meaning)
        return schema


@cache
def _docstrings(section: type[Section]) -> dict[str, str]:
    """Return the docstrings below the fields of a class, without inherited ones; none for a class without source."""
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    except (OSError, TypeError, SyntaxError):
        return {}
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }  # fmt: skip


class PassThrough(Section):
    """A section that also takes every field of a class of the installed Megatron-Core or vLLM, checked by
    `config.passthrough`. A class names its section when it is defined: `class VllmConfig(PassThrough,
    section="vllm")`."""

    model_config = ConfigDict(extra="allow")
    section: ClassVar[str] = ""
    keys_by_section: ClassVar[dict[str, set[str]]] = {}
    """Keys that the classes of each section declare; all others are fields of the installed class."""

    def __init_subclass__(cls, section: str | None = None, **_: Any) -> None:
        cls.section = section or cls.section

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.keys_by_section.setdefault(cls.section, set()).update(cls.model_fields)

    @property
    def passed(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


def changed(section: Section, plain: Section, prefix: str) -> Iterator[tuple[str, object]]:
    """Yield keys of `section` that differ from `plain`, with its values."""
    for name in type(section).model_fields:
        value, usual = getattr(section, name), getattr(plain, name)
        if isinstance(value, Section):
            yield from changed(value, usual, f"{prefix}{name}.")
        elif value != usual:
            yield f"{prefix}{name}", usual


def given_keys(section: Section, prefix: str) -> Iterator[tuple[str, object]]:
    """Yield each key that `section` or a section in it was made with, with its value."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from given_keys(value, f"{prefix}{name}.")
        elif name in section.model_fields_set:
            yield f"{prefix}{name}", value
