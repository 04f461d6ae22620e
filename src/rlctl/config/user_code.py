"""Functions and classes of user files, `path/to/file.py:name`."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from rlctl.config.files import read_text, user_path
from rlctl.errors import InputError, suggest, suggest_file

CLASSES = ("Algorithm", "Environment")
"""Kinds of names that mean classes; others mean functions."""
MODEL = "model:"
"""Prefix of a reward model's name, which is no reference to a file."""


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
        """Read the file of `path/to/file.py:function` without importing it. Raises InputError for a missing file."""
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
        """Return the function, from a module that this process runs once. Raises InputError naming file and line."""
        module = _module(self)
        if callable(function := getattr(module, self.name, None)):
            return function
        kind, is_kind = ("class", inspect.isclass) if self.what in CLASSES else ("function", inspect.isfunction)
        names = [key for key, value in vars(module).items() if is_kind(value) and value.__module__ == module.__name__]
        near = suggest(self.name, names) or f"It has {', '.join(names) or 'none'}."
        raise InputError(f"{self.what} {self.reference!r}: the file has no {kind} {self.name!r}.", near)

    def place(self, error: BaseException) -> str | None:
        """Return the last line of the file on the way to an error; None: the error is not of the file."""
        passed = any(frame.filename == str(self.path) for frame in traceback.extract_tb(error.__traceback__))
        return _last_frame(error, self.path) if passed else None

    def error(self, error: BaseException, doing: str) -> InputError:
        place = _last_frame(error, self.path)
        kind = self.what if self.what == "Algorithm" else f"{self.what} function"
        message = f"{kind} {self.reference} raised {type(error).__name__}: {error} ({doing}; {place})."
        return InputError(message, _installing(error))


def is_reference(name: str) -> bool:
    return (":" in name or name.endswith(".py")) and not name.startswith(MODEL)


def split_reference(name: str, what: str = "Reward") -> tuple[Path, str]:
    """Return absolute path and function name. Raises InputError for another form."""
    file, colon, function = name.rpartition(":")
    if not colon or not file.endswith(".py") or not function.isidentifier():
        raise InputError(f"{what} {name!r} does not name a function.", "Write path/to/file.py:function.")
    path = user_path(file).absolute()
    if not path.exists():
        raise InputError(f"{what} {name!r}: there is no file {file}.", suggest_file(path, {".py"}))
    return path, function


@functools.lru_cache(maxsize=16)
def _module(code: UserCode) -> ModuleType:
    """Run the source as a module. It may import its neighbors, unless an installed module has the name."""
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
            f"({_last_frame(error, code.path)}).",
            _installing(error),
        ) from error
    return module


def _installing(error: BaseException) -> str | None:
    """Return how to install the package that an import lacks; None for other errors."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return None
    package = error.name.partition(".")[0]
    return (
        f"Install the package that has the module {package!r} for the Python of rlctl, on every node: "
        f"{sys.executable} -m pip install {package}. A file of yours has to be next to the one that imports it."
    )


def _last_frame(error: BaseException, path: Path) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    frame = ([frame for frame in frames if frame.filename == str(path)] or frames)[-1]
    return f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}: {frame.line}"
