"""Functions of the user's own, `path/to/file.py:function`: how they are loaded, and how one scores."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import math
import numbers
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from rlctl.config.files import problem_with, read_text
from rlctl.config.paths import user_path
from rlctl.config.plugins import find_plugin, load_plugin
from rlctl.data.names import suggest, suggest_file
from rlctl.data.prompt_rows import PromptRow
from rlctl.errors import InputError

LARGEST_REWARD = 1e30
"""Sums of squares of rewards up to this fit into a float64. Nobody means a larger one."""
SIGNATURE = "(completion: str, answer, prompt: str, **row) -> float"


@dataclass(frozen=True)
class UserCode:
    """A function or class of a user's file. It is pickled as path and source, so that any process can load it."""

    path: Path
    source: str
    name: str
    what: str
    """`Reward`, `Loss` or `Algorithm`, for messages."""

    @classmethod
    def read(cls, reference: str, what: str) -> UserCode:
        """Read the file that `path/to/file.py:function` names, and import nothing.

        Raises InputError where the reference does not have that form or there is no such file.
        """
        path, name = split_reference(reference, what)
        return cls(path, read_text(path, f"{what} {reference!r}:"), name, what)

    @property
    def reference(self) -> str:
        return f"{self.path}:{self.name}"

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the file's text."""
        return sha256(self.source.encode()).hexdigest()

    def load(self) -> Callable[..., Any]:
        """Return the function, from a module that this process runs once.

        Raises InputError, naming file and line, where the file cannot be run or has no such function.
        """
        return _find(_module(self), self.name, f"{self.what} {self.reference!r}")

    def error(self, error: BaseException, doing: str) -> InputError:
        """Return what to raise where the function raised `error` while `doing` something."""
        place = _last_frame(error, self.path)
        kind = self.what if self.what == "Algorithm" else f"{self.what} function"
        return InputError(f"{kind} {self.reference} raised {type(error).__name__}: {error} ({doing}; {place}).")


def is_reference(name: str) -> bool:
    """Return whether a name is meant as `path/to/file.py:function`."""
    return ":" in name or name.endswith(".py")


def split_reference(name: str, what: str = "Reward") -> tuple[Path, str]:
    """Return absolute path and function name; InputError where that is not the form of `name`."""
    file, colon, function = name.rpartition(":")
    if not colon or not file.endswith(".py") or not function.isidentifier():
        raise InputError(f"{what} {name!r} does not name a function.", "Write path/to/file.py:function.")
    path = user_path(file).absolute()
    if not path.exists():
        raise InputError(f"{what} {name!r}: there is no file {file}.", suggest_file(path, {".py"}))
    if problem := problem_with(path):
        raise InputError(f"{what} {name!r}: {file} cannot be read: {problem}.")
    return path, function


class UserScorer:
    """Calls the function with what its signature takes. Raises InputError, naming row and line, where that fails."""

    def __init__(self, name: str) -> None:
        """Imports the file, or the installed package that brings a reward of this name. Raises InputError where that
        fails or there is no such function."""
        self.name = name
        entry = None if is_reference(name) else find_plugin("rlctl.rewards", name)
        if entry is None:
            self._code = UserCode.read(name, "Reward")
            self._function = self._code.load()
        else:
            self._function = load_plugin(entry)
            self._code = UserCode(Path(sys.modules[entry.module].__file__ or ""), "", entry.attr, "Reward")
        try:
            parameters = inspect.signature(self._function).parameters.values()
        except ValueError as error:  # some built-in ones have none
            raise InputError(f"Reward {name!r}: {error}.", f"Its form is {SIGNATURE}.") from error
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
            raise self._code.error(error, f"scoring {row.where}") from error
        number = _finite(value)
        if number is None or abs(number) > LARGEST_REWARD:
            what = "a coroutine; it must not be async" if inspect.isawaitable(value) else repr(value)[:80]
            raise InputError(
                f"Reward function {self.name} returned {what} for {row.where}.",
                f"It must return a finite number between -{LARGEST_REWARD:g} and {LARGEST_REWARD:g}.",
            )
        return number

    def _arguments(self, completion: str, row: PromptRow) -> dict[str, Any]:
        given = {**row.fields, "completion": completion, "answer": row.answer, "prompt": row.question}
        missing = sorted(self._required - given.keys())
        if missing:
            raise InputError(
                f"Reward function {self.name} needs {', '.join(missing)}, which {row.where} does not have.",
                f"It can have {', '.join(given)}; its form is {SIGNATURE}.",
            )
        return given if self._takes_all else {name: value for name, value in given.items() if name in self._takes}


def _finite(value: Any) -> float | None:
    """Return a real number as a float; None for one that is not finite, and for what is no number."""
    try:
        number = float(value) if isinstance(value, numbers.Real) else math.nan
    except OverflowError:  # a whole number of more than 300 digits
        return None
    return number if math.isfinite(number) else None


@functools.lru_cache(maxsize=16)
def _module(code: UserCode) -> ModuleType:
    """Run the source as a module. It may import its neighbours, unless an installed module has the name."""
    what = f"{code.what} {code.reference!r}"
    spec = importlib.util.spec_from_loader(f"rlctl_user_{code.path.stem}", loader=None, origin=str(code.path))
    assert spec is not None  # without a loader there is always one
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(code.path)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up by name
    if str(code.path.parent) not in sys.path:
        sys.path.append(str(code.path.parent))
    try:
        exec(compile(code.source, code.path, "exec"), vars(module))
    except SyntaxError as error:
        place = f"{error.filename or code.path}" + (f", line {error.lineno}" if error.lineno else "")
        raise InputError(f"{what}: {place}: {error.msg}.") from error
    except (Exception, SystemExit) as error:
        raise InputError(
            f"{what}: importing {code.path.name} raised {type(error).__name__}: {error} "
            f"({_last_frame(error, code.path)})."
        ) from error
    return module


def _find(module: ModuleType, function: str, what: str) -> Callable[..., Any]:
    found = getattr(module, function, None)
    if callable(found):
        return found
    functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
    near = suggest(function, functions) or f"It has {', '.join(functions) or 'none'}."
    raise InputError(f"{what}: the file has no function {function!r}.", near)


def _last_frame(error: BaseException, path: Path) -> str:
    """Return the last line of the user's own file on the way to the error."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == str(path)] or frames
    if not own:
        return path.name
    frame = own[-1]
    return f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}: {frame.line}"
