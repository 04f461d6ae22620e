"""The parts in `examples/extend/` work: those in files by their references, the package by its entry points."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray import cloudpickle

from rlctl.backends.base import EngineWorker, PolicySpec
from rlctl.backends.lookup import policy_backend
from rlctl.backends.megatron.args import transformer_values
from rlctl.cluster.placement import Placement
from rlctl.cluster.workers import WorkerGroup, WorkerSpec
from rlctl.config.parallel import ParallelSpec
from rlctl.config.plugins import load_named
from rlctl.config.user_code import UserCode
from rlctl.data.prompt_rows import PromptRow
from rlctl.environments.interface import Step
from rlctl.errors import VerificationError
from rlctl.methods.available import method_from_config
from rlctl.methods.configuration import resolve
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.models import families
from rlctl.refit.session import RefitSession
from rlctl.refit.weight_sender import WeightSender
from rlctl.rewards.user_function import user_scorer
from rlctl.settings.generation import RefitConfig
from rlctl.tiny_models.text import llama_config, tiny_config, write_tiny_model, write_tokenizer
from rlctl.training.user_loss import UserLoss
from rlctl.transport.available import transport_facts
from rlctl.weights.vllm import VllmParallel
from support import refit_workers
from support.commands import rlctl_with
from support.config_defaults import differences, written
from support.token_batches import token_batch

cloudpickle.register_pickle_by_value(refit_workers)
EXTEND = Path(__file__).parents[1] / "examples" / "extend"


def test_the_loss_gets_its_setting() -> None:
    batch = token_batch()
    code = UserCode.read(f"{EXTEND}/losses.py:softened", "Loss")
    loss_R, metrics = UserLoss(code, {"temperature": 0.5})(batch, RlConfig().loss)
    ratio_R = (batch.logprobs_R - batch.rollout_logprobs_R).exp()
    gate_R = torch.exp(-2 * (ratio_R - 1) ** 2).detach()
    torch.testing.assert_close(loss_R, -gate_R * ratio_R * batch.advantages_R)
    torch.testing.assert_close(metrics["gate"], gate_R)


def test_the_algorithm_ranks_rewards() -> None:
    flags = {"run.algorithm": f"{EXTEND}/algorithms.py:RankGrpo", "loss.params": {"power": 2.0}}
    method = method_from_config(resolve(flags=flags, environment={}).config)
    squares_G = np.array([0.5, 1.5, 2.5, 3.5]) ** 2
    expected = (squares_G - squares_G.mean()) / squares_G.std()
    assert method.advantages(np.array([0.0, 1e9, 3.0, 2.0])) == pytest.approx(expected[[0, 3, 2, 1]], abs=1e-5)


def test_the_reward_falls_with_the_distance() -> None:
    scorer, row = user_scorer(f"{EXTEND}/rewards.py:close"), PromptRow(0, "row 1", "3 + 4?", "7")
    assert [scorer(text, row) for text in ("It is 7", "5", "none")] == pytest.approx([1, 1 / 3, 0])


def test_the_game_answers() -> None:
    spec = importlib.util.spec_from_file_location("game", EXTEND / "game.py")
    assert spec is not None
    assert spec.loader is not None
    game_file = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(game_file)
    game = game_file.HigherLower(largest=20)
    assert game.reset({}, 7) == "Guess a number from 1 to 20. Write the number alone."

    def answer(text: str, stop_reason: str = "stop") -> Step:
        return game.step({"role": "assistant", "content": text, "stop_reason": stop_reason})

    assert [answer("21").messages, answer("0").messages] == ["lower", "higher"]
    assert answer("1", "length").metrics == answer("one").metrics == {"unreadable": 1}
    assert (answer(str(game.number)).reward, answer(str(game.number)).done) == (1.0, True)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example package, as an installation leaves it."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "rlctl_example").symlink_to(EXTEND / "rlctl_example")
    groups = tomllib.loads((EXTEND / "pyproject.toml").read_text())["project"]["entry-points"]
    info = folder / "rlctl_example-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: rlctl-example\nVersion: 0.1\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for group, entries in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))
    rows = [{"prompt": f"What is {a} + 3?", "completion": f"It is {a + 3}."} for a in range(9)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def rlctl(package: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return rlctl_with(package, list(words))[0]


@pytest.mark.slow
@pytest.mark.guard
def test_the_parts_of_the_package_are_found(package: Path, tiny_llama: Path) -> None:
    model = ["--model", str(tiny_llama), "--gpu", "cpu", "--dry-run", "--json"]
    recipe = package / "recipe.yaml"
    recipe.write_text("minimal_model: { path: x }\nminimal_train: { learning_rate: 3.0e-6, color: red }\n")
    texts = ["--data", str(package / "rows.jsonl"), "--max-length", "96", "--set", "focal.gamma=1"]
    questions = ["--data", "reasoning-gym:chain_sum", "--algorithm", "rank", "--set", "advantage.rank_power=2"]
    shown, ranked, imported = rlctl_with(
        package,
        ["train", "focal", *model, *texts, "--backend", "checked"],
        ["train", "grpo", *model, *questions],
        ["config", "import", str(recipe), "--json"],
    )
    assert shown.returncode == 0, shown.stderr
    config = json.loads(shown.stdout)["config"]
    assert (config["focal.gamma"]["value"], config["training.backend"]["value"]) == (1, "checked")
    assert ranked.returncode == 0, ranked.stderr
    assert json.loads(ranked.stdout)["config"]["advantage.rank_power"]["value"] == 2
    assert imported.returncode == 0, imported.stderr
    assert json.loads(imported.stdout)["values"] == {"model.name": "x", "optimizer.lr": 3e-6}


@pytest.fixture
def installed(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example package in this process, and nothing of it afterwards."""
    caches = (families.family, families.has_file, families.weights_of, transport_facts)
    monkeypatch.syspath_prepend(str(package))
    yield
    for cache in caches:
        cache.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "rlctl_example"]:
        del sys.modules[name]


def test_the_family_reads_configurations_as_transformers_does(installed: None) -> None:
    from transformers import CwmConfig

    assert differences(families.family("cwm")) == {}
    published = written(CwmConfig())  # facebook/cwm has the defaults of its class
    facts = families.facts_from_hf_config(published)
    assert facts.full_attention_layers == tuple(range(0, 64, 4))
    spec = PolicySpec(facts)
    policy_backend("megatron").require(spec)
    windowed = transformer_values(spec, te=False)["window_attn_skip_freq"]
    assert [("full_attention", "sliding_attention")[one] for one in windowed] == published["layer_types"]


@pytest.mark.parametrize("layers", [2, 4])
def test_the_family_has_a_tiny_model_for_a_rehearsal(installed: None, tmp_path: Path, layers: int) -> None:
    from transformers import AutoModelForCausalLM, CwmConfig

    facts = families.facts_from_hf_config(written(CwmConfig()))
    tiny = write_tiny_model(tmp_path, tiny_config(facts, layers=layers))
    assert tiny.full_attention_layers == tuple(range(0, layers, 2))
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model).__name__ in families.family("cwm").architectures


@pytest.mark.slow
def test_the_family_is_rehearsed(package: Path, tmp_path: Path) -> None:
    """The published sizes, made small: vLLM's log-probs are Megatron's."""
    from transformers import CwmConfig

    (tmp_path / "config.json").write_text(json.dumps(written(CwmConfig())))
    write_tokenizer(tmp_path)
    words = ["--preset", "1node", "--model", str(tmp_path), "--backend", "megatron", "--json"]
    done = rlctl(package, "rehearse", *words)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rehearsed"].keys() >= {"plan", "step 1", "step 2", "kill and resume", "export"}


@pytest.mark.slow
def test_the_transport_serves_real_engines(package: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", llama_config(tied=False))
    write_tokenizer(tmp_path / "model")
    words = ["--model", str(tmp_path / "model"), "--gpu", "cpu", "--mover", "object-store", "--json"]
    done = rlctl(package, "refit-test", *words, "--set", f"refit.directory=file://{tmp_path}/store")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["mover"], result["passed"]) == ("object-store", True)


def test_the_transport_takes_weights_through_a_store(
    package: Path, installed: None, placement: Placement, tmp_path: Path
) -> None:
    """Ranks in Megatron's layouts and an engine worker in vLLM's, each a process that has the package."""
    facts = families.facts_from_hf_config(llama_config(tied=True))
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])}
    specs = [WorkerSpec({}, (placement.bundles[0],), env) for _ in range(3)]
    slots = WorkerGroup("slot", refit_workers.Slot, specs, placement, tmp_path, start_timeout_s=120, call_timeout_s=60)
    policy, engine = slots.part([0, 1], "policy"), slots.part([2], "engine")
    sources = [(rank, facts, ParallelSpec(tp=2), "float32", None, "cpu", False) for rank in range(2)]
    policy.call_each(refit_workers.Slot.become_source, sources)
    engine.call(refit_workers.Slot.become_engine, 0, facts, VllmParallel(), "float32", None)
    store = tmp_path / "store"
    settings = RefitConfig(timeout_s=60, staging_mb=1, mover="object-store", directory=f"file://{store}")
    session = RefitSession(policy, engine, facts, settings=settings, dtype="float32")
    session.open()
    assert session.mover == "object-store"
    for version in (1, 2):
        engine.call(EngineWorker.poison)
        policy.call(WeightSender.refit_perturb, version, 0.1)
        assert session.refit(version, verify=True).verified == len(session.setup.table)
    assert [path.name for path in store.glob("*/*")] == ["2"]
    with pytest.raises(VerificationError, match="holds no complete version 9"):
        engine.call(EngineWorker.refit_receive, {"version": 9, "attempt": 9})
    session.close()
    assert list(store.iterdir()) == []
    slots.kill()


@pytest.mark.long
def test_the_transport_is_planned_and_checked(package: Path, tiny_llama: Path) -> None:
    plan = ["plan", "--model", str(tiny_llama), "--gpu", "cpu", "--set", "refit.mover=object-store"]
    store = ["--set", "refit.directory=memory://weights"]
    shown, lacking, other, helped, wrong = rlctl_with(
        package,
        [*plan, *store, "--json"],
        plan,
        [*plan, "--set", "refit.mover=collective", *store],
        ["refit-test", "--help"],
        ["config", "show", "--set", "refit.mover=object-stor"],
    )
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["mover"] == "object-store"
    assert (lacking.returncode, "refit.mover = object-store needs refit.directory" in lacking.stderr) == (2, True)
    assert "only refit.mover = disk or object-store uses one" in other.stderr
    assert "|object-store" in helped.stdout
    assert (wrong.returncode, "'disk' or 'object-store'" in wrong.stderr) == (2, True)


@pytest.mark.guard
@pytest.mark.slow
def test_the_adapter_asks_until_the_answer_is_right(package: Path, installed: None, tiny_llama: Path) -> None:
    adapter: Any = load_named("rlctl.environments", "reasoning-attempts", {})
    game = adapter("chain_sum", attempts=3, min_terms=2, max_terms=2)
    terms = re.findall(r"-?\d+", game.reset({}, 5).partition("=")[0].replace(" - ", " + -"))
    right = str(sum(map(int, terms)))
    assert game.reset({}, 5) == adapter("chain_sum", min_terms=2, max_terms=2).reset({}, 5)
    first, second = (game.step({"role": "assistant", "content": text}) for text in ("none", right))
    assert (first.done, second.done, second.reward, second.metrics) == (False, True, 1.0, {"attempts": 2})
    game.reset({}, 5)
    last = [game.step({"role": "assistant", "content": "none"}) for _ in range(3)][-1]
    assert (last.done, last.reward < 1) == (True, True)
    words = ["--model", str(tiny_llama), "--data", "reasoning-gym:chain_sum", "--gpu", "cpu", "--max-length", "400"]
    shown = rlctl(package, "train", "grpo", *words, "--env", "reasoning-attempts", "--dry-run", "--json")
    assert shown.returncode == 0, shown.stderr


def test_the_logger_writes_what_a_run_measures(package: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from rlctl.telemetry.loggers import LoggedRun, start_loggers\n"
        "for finished in (0, 1):\n"
        "    run = LoggedRun(Path(sys.argv[1]), 'project', 'name', {}, finished)\n"
        "    (thread,) = start_loggers(['csv-lines'], run, print)\n"
        "    for step in (finished + 1, finished + 2):\n"
        "        thread.log(step, {'step': step, 'reward_mean': step + finished / 2})\n"
        "    thread.close()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package), str(EXTEND.parents[1] / "src")])}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    lines = (tmp_path / "metrics.csv").read_text().splitlines()
    assert lines == ["step,name,value", "1,train/reward,1.0", "2,train/reward,2.5", "3,train/reward,3.5"]
    show = ["config", "show", "--json", "--set"]
    shown, wrong = rlctl_with(package, [*show, "run.loggers=[csv-lines]"], [*show, "run.loggers=[csv-line]"])
    assert json.loads(shown.stdout)["run"]["loggers"] == ["csv-lines"], shown.stderr
    assert wrong.returncode == 2
    assert "rlctl has no logger 'csv-line', only tensorboard, wandb, mlflow, trackio, csv-lines" in wrong.stderr
