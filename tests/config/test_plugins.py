"""Plug-ins: a tiny installed distribution brings an algorithm, a training backend and a reward by entry points."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlctl.backends import lookup
from rlctl.backends.lookup import policy_backend, require_backends
from rlctl.config.plugins import find_plugin, plugin_names
from rlctl.data.prompt_rows import PromptRow
from rlctl.errors import ConfigError, InputError
from rlctl.methods.available import method_from_config
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.rewards.prepare_rewards import require_known
from rlctl.rewards.user_function import user_scorer
from rlctl.settings.rewards import RewardConfig, RewardTerm

ENTRY_POINTS = """
[rlctl.algorithms]
toy = toy_rlctl.algorithm:Toy
broken = toy_rlctl.broken:Nothing
function = toy_rlctl.reward:brief

[rlctl.backends]
toy-backend = toy_rlctl.backend:BACKEND
other-name = toy_rlctl.backend:BACKEND

[rlctl.rewards]
brief = toy_rlctl.reward:brief
"""
FILES = {
    "__init__.py": "",
    "algorithm.py": """
        import rlctl
        class Toy(rlctl.Algorithm):
            def advantages(self, rewards_G):
                return 2 * rewards_G
            def token_loss(self, batch):
                return -batch.logprobs_R * batch.advantages_R
    """,
    "broken.py": "import a_package_that_is_not_here",
    "reward.py": """
        from .lengths import length
        def brief(completion, **row):
            return {}["absent"] if completion == "raise" else -length(completion)
    """,
    "lengths.py": "length = len",
    "backend.py": """
        from rlctl.backends.lookup import PolicyBackend
        BACKEND = PolicyBackend("toy-backend", "toy_rlctl.worker:Worker", lambda spec: None, lambda spec: [], print)
    """,
}


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory of `sys.path` with the distribution `toy-rlctl`."""
    from textwrap import dedent

    for folder, files in (
        ("toy_rlctl-1.2.dist-info", {"METADATA": "Name: toy-rlctl\nVersion: 1.2\n", "entry_points.txt": ENTRY_POINTS}),
        ("toy_rlctl", {name: dedent(text) for name, text in FILES.items()}),
    ):
        (tmp_path / folder).mkdir()
        for name, text in files.items():
            (tmp_path / folder / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(lookup, "POLICIES", dict(lookup.POLICIES))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "toy_rlctl"]:
        del sys.modules[name]


def config(algorithm: str) -> RlConfig:
    return RlConfig.model_validate({"run": {"algorithm": algorithm}})


def test_names_are_read_and_nothing_is_imported(toy: Path) -> None:
    assert plugin_names("rlctl.algorithms") == ("broken", "function", "toy")
    assert find_plugin("rlctl.algorithms", "absent") is None
    require_known(RewardConfig(terms=(RewardTerm(name="brief"),)))
    method_from_config(config("grpo"))
    assert not [name for name in sys.modules if name.startswith("toy_rlctl")]


def test_an_algorithm_is_made_here_and_in_another_process(toy: Path) -> None:
    algorithm = method_from_config(config("toy"))
    assert algorithm.advantages(1.5) == 3
    assert algorithm.manifest() == {"name": "toy", "package": "toy-rlctl 1.2"}
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).advantages(2))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(toy), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(algorithm), env=environment, capture_output=True, timeout=120
    )
    assert done.stdout.strip() == b"4", done.stderr


def test_an_algorithm_that_does_not_work_is_told(toy: Path) -> None:
    with pytest.raises(InputError, match=r"'broken' of toy-rlctl 1\.2 cannot be imported .*ModuleNotFoundError"):
        method_from_config(config("broken"))
    with pytest.raises(InputError, match=r"'function' of toy-rlctl 1\.2 is not a class of an algorithm"):
        method_from_config(config("function"))
    with pytest.raises(ConfigError) as caught:
        method_from_config(config("toyy"))
    assert "toy" in (caught.value.hint or "")


def test_an_algorithm_whose_package_is_gone_is_told(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pickled = pickle.dumps(method_from_config(config("toy")))
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(toy)])
    with pytest.raises(InputError, match=r"toy-rlctl 1\.2, which is not installed here"):
        pickle.loads(pickled)


def selected(backend: str) -> RlConfig:
    return RlConfig.model_validate({"training": {"backend": backend}})


def test_a_backend_is_registered_when_it_is_asked_for(toy: Path) -> None:
    require_backends(selected("megatron"))
    assert "toy_rlctl.backend" not in sys.modules
    require_backends(selected("toy-backend"))
    assert policy_backend("toy-backend").worker == "toy_rlctl.worker:Worker"
    with pytest.raises(ConfigError, match="is not a PolicyBackend of that name"):
        require_backends(selected("other-name"))
    with pytest.raises(ConfigError, match="toy-bckend is not known") as caught:
        require_backends(selected("toy-bckend"))
    assert "toy-backend" in (caught.value.hint or "")


def test_a_reward_may_import_its_neighbors(toy: Path) -> None:
    row = PromptRow(0, "row 1", "question", "answer")
    scorer = user_scorer("brief")
    assert scorer("four", row) == -4
    with pytest.raises(InputError, match=r"reward\.py, line 4, in brief"):
        scorer("raise", row)
    with pytest.raises(InputError, match="Unknown reward 'bref'") as caught:
        require_known(RewardConfig(terms=(RewardTerm(name="bref"),)))
    assert "brief" in (caught.value.hint or "")


def test_two_packages_with_the_same_name_are_refused(toy: Path) -> None:
    (toy / "other-2.dist-info").mkdir()
    (toy / "other-2.dist-info" / "METADATA").write_text("Name: other\nVersion: 2\n")
    (toy / "other-2.dist-info" / "entry_points.txt").write_text("[rlctl.algorithms]\ntoy = other:Toy\n")
    with pytest.raises(InputError, match="Several installed packages bring 'toy'"):
        find_plugin("rlctl.algorithms", "toy")
