"""Every configuration key and environment variable that a message, a docstring or a page names exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import rlctl
from rlctl.config.other_trainers import NAMES
from rlctl.config.passthrough import ALIASES, MANAGED, TARGETS, installed_field
from rlctl.config.sources import OWN_VARIABLES
from rlctl.methods.configuration import schema
from rlctl.methods.rl.rl_config import RlConfig
from rlctl.recipes.hydra import Override
from rlctl.recipes.nemo_rl.recipe import import_recipe

SOURCE = Path(rlctl.__file__).parent
DOCS = SOURCE.parents[1] / "docs"
PAGES = (*(page for page in DOCS.glob("*.md") if page.name != "coming_from.md"), SOURCE.parents[1] / "README.md")
KEY = re.compile(rf"(?<![\w./-])({'|'.join(RlConfig.model_fields)})\.([a-z_]+(?:\.[a-z_]+)*)\b(?![(*])")
FILES_AND_MODULES = (
    "model.safetensors", "data.jsonl", "run.yaml", "refit.session", "megatron.core", "training.md", "refit.md",
    "cluster.md", "advantage.rank_power", "data.train.dataset_name",
)  # fmt: skip
"""Names that look like keys, the key of the example package on the page about extending, and a key of NeMo-RL's."""


def texts() -> Iterator[tuple[str, str]]:
    """Each text of the sources that has more than one word, with its place; f-strings as a whole."""
    for path in sorted(SOURCE.rglob("*.py")):
        if "recipes" in path.parts:  # these name the keys of other trainers
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Constant(value=str() as text):
                    pass
                case ast.JoinedStr(values=parts):
                    text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts)
                case _:
                    continue
            if " " in text:
                yield f"{path.relative_to(SOURCE)}:{node.lineno}", text
    of_flags = [group["use"] for group in NAMES["similar_flags"]]
    yield from (("names.toml", text) for text in (*of_flags, *NAMES["managed"].values()))
    for page in PAGES:
        yield page.name, page.read_text()


def exists(key: str) -> bool:
    whole = ".".join(key.split(".")[:2])
    if key in schema().keys or key in ALIASES or key in MANAGED:
        return True
    if key.partition(".")[0] in TARGETS:
        return installed_field(whole) is not None
    return whole in schema().keys and schema().field(key) is not None


def test_every_key_that_is_named_exists() -> None:
    found = [(place, match.group(0)) for place, text in texts() for match in KEY.finditer(text)]
    assert len(found) > 200
    wrong = [(place, key) for place, key in found if not key.startswith(FILES_AND_MODULES) and not exists(key)]
    assert not wrong


def test_a_key_that_does_not_exist_is_found() -> None:
    assert not exists("training.sp")
    assert not exists("vllm.no_such_field")
    assert KEY.findall("Leave training.sp unset.") == [("training", "sp")]


def test_variables_without_a_key_are_those_that_the_environment_may_hold() -> None:
    named = {name for _, text in texts() for name in re.findall(r"\bRLCTL_[A-Z_]+[A-Z]\b", text)}
    wrong_example = {"RLCTL_STEPS"}
    assert {name for name in named if "__" not in name} - wrong_example <= set(OWN_VARIABLES)
    code = (path.read_text() for path in SOURCE.rglob("*.py") if path.name != "sources.py")
    assert {name for text in code for name in re.findall(r'"(RLCTL_[A-Z_]+[A-Z])"', text)} == set(OWN_VARIABLES)


def test_every_key_of_another_trainer_leads_to_a_key_that_exists() -> None:

    from rlctl.config.other_trainers import KEYS

    assert [key for key in KEYS.values() if schema().field(key) is None] == []
    assert schema().nearest("actor_rollout_ref.rollout.n") == "batch.generations"


def test_every_key_that_stands_for_one_of_another_program_exists() -> None:
    rows = re.findall(r"^\|(.*)\|(.*)\|$", (DOCS / "coming_from.md").read_text(), re.MULTILINE)
    found = [match.group(0) for _, ours in rows for match in KEY.finditer(ours)]
    assert len(found) > 50
    assert [key for key in found if not exists(key)] == []


def test_keys_of_nemo_rl_become_those_that_the_page_says() -> None:
    section = (DOCS / "coming_from.md").read_text().partition("## NeMo-RL")[2].partition("## verl")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| `([\w.]+)` \|$", section, re.MULTILINE)
    assert len(rows) > 10
    values = {"policy.precision": "bfloat16", "loss_fn.reference_policy_kl_type": "k3", "policy.model_name": "name"}
    flags = ("normalize_rewards", "use_leave_one_out_baseline", "token_level_loss", "enabled")
    for theirs, ours in rows:
        value = values.get(theirs, True if theirs.endswith(flags) else 0.5 if "ratio_clip_m" in theirs else 4)
        recipe = import_recipe(None, [Override(theirs, value)])
        assert ours in recipe.values, (theirs, recipe.entries)
