"""Environments of Prime's `verifiers`, in a separate Python (`verifiers_program.py`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlctl.environments.builtin.program import Program


class Verifiers(Program):
    """An installed environment of Prime's `verifiers`, by name, in the Python that has it (`python`). Its data are the
    tasks, and the seed chooses one; `arguments` go to its `load_environment`."""

    def __init__(self, environment: str, python: str = "python", arguments: Mapping[str, Any] | None = None) -> None:
        script = Path(__file__).with_name("verifiers_program.py")
        super().__init__([python, str(script), environment, json.dumps(dict(arguments or {}))])
