"""Importers of recipes: found by entry points, imported for recipes alone, and named where a package is missing."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import rlctl
from rlctl.config import plugins
from rlctl.config.recipes import Entry, Import
from rlctl.errors import ConfigError, InputError
from rlctl.methods.configuration import resolve
from rlctl.recipes import available
from support.commands import rlctl as command

RECIPE = Path(__file__).parent / "nemo_rl" / "llama_megatron.yaml"
SOURCE = Path(rlctl.__file__).parent


class Abacus:
    """An importer of a trainer whose recipes have the section `abacus`."""

    trainer = "Abacus"

    def recognizes(self, path: Path, values: Mapping[str, Any]) -> bool:
        return "abacus" in values

    def sections(self) -> Collection[str]:
        return ("abacus",)

    def has(self, key: str) -> bool:
        return key == "abacus.rate"

    def read(self, path: Path | None, overrides: Sequence[str], method: str | None) -> Import:
        result = Import(path or Path("recipe.yaml"), trainer=self.trainer)
        result.overridden = frozenset(text.partition("=")[0] for text in overrides)
        rate = float(overrides[-1].partition("=")[2]) if overrides else 0.5
        result.set("optimizer.lr", rate, "abacus.rate")
        result.entries.append(Entry("abacus.beads", 3, "changed", "beads are counted by rlctl"))
        return result


@pytest.fixture
def abacus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that brings the importer by its entry point."""
    entry = metadata.EntryPoint("abacus", f"{__name__}:Abacus", "rlctl.recipes")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Abacus.__module__])
    found = plugins._entry_points

    def with_abacus(places: tuple[str, ...]) -> metadata.EntryPoints:
        return metadata.EntryPoints([*found(places), entry])

    monkeypatch.setattr(plugins, "_entry_points", with_abacus)
    available.importer.cache_clear()


def test_a_package_brings_an_importer(abacus: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "beads.yaml"
    path.write_text("abacus: {rate: 0.5, beads: 3}\n")
    resolved = resolve(files=[path], environment={})
    assert (resolved.config.optimizer.lr, resolved.origin["optimizer.lr"]) == (0.5, f"file {path}, abacus.rate")
    assert resolved.notes == ("runs differently: abacus.beads = 3: beads are counted by rlctl",)
    resolved = resolve(files=[path], environment={}, overrides=["abacus.rate=0.25"])
    assert (resolved.config.optimizer.lr, resolved.origin["optimizer.lr"]) == (0.25, "override abacus.rate")
    assert resolve(environment={}, overrides=["abacus.rate=2"]).config.optimizer.lr == 2
    code, out, err = command(capsys, "config", "import", str(path))
    assert code == 0
    assert "lr: 0.5" in out
    assert "beads are counted by rlctl" in err


def test_a_key_that_nobody_has_is_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown key `abakus.rate`: neither rlctl nor a trainer whose recipes"):
        resolve(environment={}, overrides=["abakus.rate=2"])


def test_an_importer_without_a_method_is_named(abacus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Abacus, "has")
    with pytest.raises(InputError, match="The importer of recipes 'abacus' has no method 'has'"):
        available.importer("abacus")


def test_a_configuration_of_rlctl_s_own_imports_no_importer(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("optimizer: {lr: 1e-6}\n")
    code = f"""
import sys
from rlctl.methods.configuration import resolve
resolve(files=[{str(path)!r}], environment={{}}, overrides=["run.steps=3"])
print(*(name for name in sys.modules if name.startswith(("rlctl.recipes.", "hydra", "omegaconf"))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.split() in ([], ["rlctl.recipes.available"])


def test_without_the_extra_a_recipe_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rlctl.recipes.hydra.find_spec", lambda name: None)
    code, _, err = command(capsys, "config", "validate", "--config", str(RECIPE))
    assert code == 2
    assert err.strip() == (
        "rlctl: Reading NeMo-RL's keys needs hydra-core and omegaconf: `pip install hydra-core omegaconf`."
    )


def test_the_core_names_no_trainer_whose_recipes_are_read() -> None:
    """Other trainers are named by importers, adapters, and the variables and defaults of checkpoint directories."""
    found = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if re.search(r"nemo[-_ ]?rl|\bverl\b", path.read_text(), re.IGNORECASE)
        and not {"recipes", "adapters"} & set(path.relative_to(SOURCE).parts)
    }
    assert found <= {"checkpoints/locations.py"}
