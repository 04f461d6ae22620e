"""The transports by name: each technology is one file, which alone has the name."""

from __future__ import annotations

import ast
import math
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

import rlctl
from rlctl.errors import ConfigError, InputError
from rlctl.methods.configuration import resolve
from rlctl.transport.available import BUILT_IN, choose, names, storing, transport_facts
from rlctl.transport.facts import Places, Rates
from rlctl.transport.movers import Transport, transport

SOURCE = Path(rlctl.__file__).parent


def test_names_of_transports_stand_in_quotes_in_their_room_alone() -> None:
    """Other things have the same names: checks of `doctor` (`disk`, `cuda-ipc`), and a limit of sandboxes (`disk`)."""
    found = []
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).parts[0] in ("transport", "doctor") or path.name == "sandboxes.py":
            continue
        texts = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
        found += [(str(path.relative_to(SOURCE)), node.lineno, node.value) for node in texts if node.value in BUILT_IN]
    assert found == []


def test_facts_of_transports_are_read_without_torch() -> None:
    code = (
        "import sys; from rlctl.transport.available import names, transport_facts\n"
        "print(*(transport_facts(name).name for name in names()), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == [*BUILT_IN, "False"]


def test_auto_takes_shared_memory_if_there_is_any() -> None:
    """The row `auto` of docs/refit.md, for every place."""
    for on_cpu, elsewhere, away, barred in product((True, False), ("", "x"), ("", "x"), ("", "x")):
        shared = not away if on_cpu else not elsewhere
        expected = ("shared-memory" if on_cpu or barred else "cuda-ipc") if shared else "collective"
        assert choose(Places(on_cpu, elsewhere, away, barred)) == expected


def test_what_auto_takes_is_never_refused() -> None:
    for on_cpu, elsewhere, barred in product((True, False), ("", "x"), ("", "x")):
        for away in ("", "x") if on_cpu or elsewhere else ("",):  # who shares a GPU shares its node
            places = Places(on_cpu, elsewhere, away, barred)
            transport_facts(choose(places)).require_place(places)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_transport_has_both_ends_and_says_what_it_costs(name: str) -> None:
    facts = transport(name)
    assert isinstance(facts, Transport)
    assert (facts.name, facts.way.endswith(".")) == (name, True)
    assert facts.stored == (name in storing()) == (name == "disk")
    # One copy is written and one is read; processors have no memory beside their own.
    on_gpu, on_cpu = (facts.detour_s(6e9, Rates(2e9, host)) for host in (3e9, math.inf))
    expected = {"disk": (6.0, 6.0), "shared-memory": (4.0, 0.0)}
    assert (on_gpu, on_cpu) == expected.get(name, (0.0, 0.0))


def test_a_name_that_nothing_brings_is_refused() -> None:
    with pytest.raises(InputError, match=r"No installed package brings 'pigeon' in rlctl\.transports"):
        transport_facts("pigeon")
    assert "pigeon" not in names()
    known = "'auto', 'shared-memory', 'cuda-ipc', 'collective' or 'disk'"
    with pytest.raises(ConfigError, match=rf"`refit\.mover` = 'pigeon' \(--set\): it should be {known}\."):
        resolve(sets=["refit.mover=pigeon"], environment={})
    assert resolve(sets=["refit.mover=auto"], environment={}).config.refit.mover == "auto"
    with pytest.raises(ConfigError, match=r"refit.mover = disk needs refit\.directory"):
        transport_facts("disk").require_directory(None)
