"""Prompt templates: a text with places for the columns of a row."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from rlctl.errors import InputError, first_line, suggest
from rlctl.settings.data import DataConfig

PROMPT = "prompt"
"""A template's name for the prompt, regardless of its field."""
ANSWER = "answer"
# After a command of LaTeX braces are text: \boxed{answer} names no column.
_PLACE = re.compile(r"\\[A-Za-z]+\{\w*\}|\{([A-Za-z_]\w*)\}")


class PromptTemplate:
    """A prompt template; made by `template_of`. `{name}` inserts a column. A text with `{{` or `{%` is Jinja."""

    def __init__(self, text: str) -> None:
        self.jinja = "{{" in text or "{%" in text
        if self.jinja:
            import jinja2
            import jinja2.meta
            import jinja2.sandbox

            # A recipe of somebody else's may bring the template: it may not reach what Python objects lead to.
            environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
                undefined=jinja2.StrictUndefined, keep_trailing_newline=True
            )
            environment.filters["tojson"] = _json
            try:
                self.names = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(text)))
                self._compiled = environment.from_string(text)
            except jinja2.TemplateSyntaxError as error:
                raise InputError(f"data.prompt_template, line {error.lineno}: {error.message}.") from error
        else:
            self._text, self.names = text, frozenset(filter(None, _PLACE.findall(text)))
        if not self.names:
            raise InputError(
                "data.prompt_template has no place for the prompt.",
                "Write {prompt}, or the columns of a row such as {question}, at their places.",
            )

    def render(self, columns: Mapping[str, Any], where: str) -> str:
        """Return the text for the row at `where`. Raises InputError where it lacks a column."""

        def filled(place: re.Match[str]) -> str:
            if (name := place[1]) is None:
                return place[0]
            if (value := columns.get(name)) is None:
                raise missing_column(name, columns, where)
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

        if not self.jinja:
            return _PLACE.sub(filled, self._text)
        import jinja2

        try:
            return self._compiled.render(columns)
        except jinja2.UndefinedError as error:
            reason = f"{where}: data.prompt_template cannot be filled in: {error.message}."
            raise InputError(reason, columns_there(columns)) from error
        # A template is a program: its variables may be missing or zero.
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise InputError(f"{where}: data.prompt_template cannot be filled in: {reason}.") from error


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` of chat templates: Jinja's escapes for HTML and sorts keys."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=str
    )


def template_of(data: DataConfig) -> PromptTemplate | None:
    """Return the template of `data`. Raises InputError for one that names no column, or the reference answer."""
    if data.prompt_template is None:
        return None
    template = _template_of(data.prompt_template)
    if fields := template.names & {ANSWER, data.answer_field}:
        raise InputError(
            f"data.prompt_template names {min(fields)!r}, which is the reference answer: the model would be shown it.",
            "Leave it out; braces that are meant as text are written {{ '{...}' }}.",
        )
    return template


def missing_column(name: str, present: Iterable[str], where: str) -> InputError:
    return InputError(f"{where}: no column {name!r} for data.prompt_template.", columns_there(present, name))


def columns_there(present: Iterable[str], near: str = "") -> str:
    names = sorted({PROMPT, *present} - {ANSWER})
    if names == [PROMPT]:
        return "There is nothing but a prompt; --set data.prompt_template={prompt} takes it as it is."
    meant = suggest(near, names) if near else None
    return f"{meant + ' ' if meant else ''}It can have {', '.join(names)}; braces that are text: {{{{ '{{...}}' }}}}."


_template_of = functools.lru_cache(maxsize=16)(PromptTemplate)
