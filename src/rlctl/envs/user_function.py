"""Reward functions of the user's own: `path/to/file.py:function`."""

from __future__ import annotations

import importlib.util
import inspect
import math
import numbers
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rlctl.config.paths import user_path
from rlctl.data.names import suggest, suggest_file
from rlctl.data.rows import PromptRow
from rlctl.errors import InputError

ARGUMENTS = ("completion", "answer", "prompt")
SIGNATURE = "(completion: str, answer, prompt: str, **row) -> float"


def split_reference(name: str) -> tuple[Path, str]:
    """Absolute path and function name of `path/to/file.py:function`; InputError where that is not its form."""
    file, colon, function = name.rpartition(":")
    if not colon or not file.endswith(".py") or not function.isidentifier():
        raise InputError(f"Reward {name!r} does not name a function.", "Write path/to/file.py:function.")
    path = user_path(file).absolute()
    if not path.is_file():
        raise InputError(f"Reward {name!r}: there is no file {file}.", suggest_file(path, {".py"}))
    return path, function


class UserScorer:
    """Calls the function with what its signature takes. Raises InputError, naming row and line, where that fails."""

    def __init__(self, name: str) -> None:
        """Imports the file. Raises InputError where that fails or it has no such function."""
        self.name = name
        self._path, function = split_reference(name)
        module = _import_file(self._path, name)
        self._function = _find(module, function, name)
        parameters = inspect.signature(self._function).parameters.values()
        self._takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self._takes = {parameter.name for parameter in named}
        self._required = {parameter.name for parameter in named if parameter.default is parameter.empty}
        if any(p.kind is p.POSITIONAL_ONLY for p in parameters):
            raise InputError(f"Reward {name!r} has positional-only parameters.", f"Its form is {SIGNATURE}.")

    def __call__(self, completion: str, row: PromptRow) -> float:
        try:
            value = self._function(**self._arguments(completion, row))
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                f"Reward function {self.name} raised {type(error).__name__}: {error} (scoring {row.where}; "
                f"{_last_frame(error, self._path)})."
            ) from error
        return self._number(value, row)

    def _arguments(self, completion: str, row: PromptRow) -> dict[str, Any]:
        given = {**row.fields, "completion": completion, "answer": row.answer, "prompt": row.question}
        missing = sorted(self._required - given.keys())
        if missing:
            raise InputError(
                f"Reward function {self.name} needs {', '.join(missing)}, which {row.where} does not have.",
                f"It can have {', '.join(given)}; its form is {SIGNATURE}.",
            )
        return given if self._takes_all else {name: value for name, value in given.items() if name in self._takes}

    def _number(self, value: Any, row: PromptRow) -> float:
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            what = "a coroutine; it must not be async" if inspect.isawaitable(value) else repr(value)[:80]
            raise InputError(
                f"Reward function {self.name} returned {what} for {row.where}.", "It must return a finite number."
            )
        return float(value)


def _import_file(path: Path, name: str) -> ModuleType:
    """The module, with its own folder importable."""
    spec = importlib.util.spec_from_file_location(f"rlctl_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InputError(f"Reward {name!r}: {path} cannot be imported as Python.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up by name
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise InputError(f"Reward {name!r}: {error.filename}, line {error.lineno}: {error.msg}.") from error
    except (Exception, SystemExit) as error:
        raise InputError(
            f"Reward {name!r}: importing {path.name} raised {type(error).__name__}: {error} "
            f"({_last_frame(error, path)})."
        ) from error
    return module


def _find(module: ModuleType, function: str, name: str) -> Callable[..., Any]:
    found = getattr(module, function, None)
    if callable(found):
        return found
    functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
    near = suggest(function, functions) or f"It has {', '.join(functions) or 'none'}."
    raise InputError(f"Reward {name!r}: the file has no function {function!r}.", near)


def _last_frame(error: BaseException, path: Path) -> str:
    """The last line of the user's own file on the way to the error."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == str(path)] or frames
    if not own:
        return path.name
    frame = own[-1]
    return f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}: {frame.line}"
