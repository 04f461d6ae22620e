"""NeMo-RL's recipes that rlctl plans, by version and kind, and why it does not plan the others.

    python benchmarks/recipes.py path/to/RL
    python benchmarks/recipes.py --git path/to/RL/.git --ref v0.3.0 --ref v0.7.0 --reasons 20

A recipe counts as planned where `rlctl train --config RECIPE --dry-run` ends with 0: its keys are imported, nothing in
it stops a run, and a layout fits the machine it asks for: H100s (or `--gpu`), and GB200s where a node has four GPUs.
Recipes of images, of sound or video, of environments of NeMo Gym and of evaluations have rows of their own; what is
left is the row of texts. `--images` leaves all but images, sound and video out.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlctl.errors import RlctlError
from rlctl.methods.configuration import resolve
from rlctl.preparation.located import Located
from rlctl.preparation.named import name_run
from rlctl.preparation.open_model import published_facts, published_teacher
from rlctl.preparation.planned import plan_run
from rlctl.recipes.nemo_rl import NemoRl
from rlctl.recipes.nemo_rl.mapping_rules import of_images, sound_or_video
from rlctl.recipes.nemo_rl.recipe import leaves_of, read_recipe

KINDS = ("eval", "sft", "dpo", "rm", "ppo", "distillation", "grpo")
"""Sections that say what a recipe is for, the most particular first."""
PLANNED, IMAGES, OTHER_MEDIA, GYM = "planned", "images", "sound or video", "NeMo Gym"
APART = (IMAGES, OTHER_MEDIA, GYM, "eval")
"""Rows that are not of text alone."""


def recipes(root: Path) -> Iterator[Path]:
    """Yield the recipes below a checkout of NeMo-RL."""
    for path in sorted(root.rglob("*.yaml")):
        if "quant_configs" not in path.parts and NemoRl().recognizes(path, read_recipe(path)):
            yield path


def kind_of(path: Path) -> str:
    """Return what a recipe is for: the section of its algorithm, or what it needs besides texts."""
    sections = read_recipe(path)
    if "eval" in sections:
        return "eval"
    leaves = dict(leaves_of(sections))
    if of_images(leaves):
        return OTHER_MEDIA if sound_or_video(leaves) else IMAGES
    if leaves.get("env.should_use_nemo_gym") is True:
        return GYM
    return next((name for name in KINDS if name in sections), "other")


FOUR_TO_A_NODE = "gb200"


def outcome(path: Path, gpu: str) -> str:
    """Return `PLANNED`, or the reason why a recipe has no plan."""
    try:
        resolved = resolve(files=[path], environment={})
        named, config = name_run(resolved, lambda _: None), resolved.config
        gpu = FOUR_TO_A_NODE if config.cluster.gpus_per_node == 4 else gpu
        facts, teacher = published_facts(config.model), published_teacher(config)
        plan_run(Located(named.resolved, named.method, facts, teacher, gpu))
        return PLANNED
    except RlctlError as error:
        lines = error.message.splitlines()
        return (
            lines[-1] if len(lines) == 2 else lines[0] if len(lines) == 1 else f"{lines[1]} (and {len(lines) - 2} more)"
        )


def checkouts(arguments: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name and the folder of each version."""
    for place in arguments.checkouts:
        yield place.name, place
    for ref in arguments.ref:
        place = folder / ref
        place.mkdir(parents=True)
        archive = subprocess.run(
            ["git", f"--git-dir={arguments.git}", "archive", ref, "examples"], check=True, capture_output=True
        )
        subprocess.run(["tar", "-x", "-C", str(place)], input=archive.stdout, check=True)
        yield ref, place


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, help="checkouts of NeMo-RL")
    parser.add_argument("--git", type=Path, help="a git directory of NeMo-RL")
    parser.add_argument("--ref", action="append", default=[], help="a version of --git (repeatable)")
    parser.add_argument("--gpu", default="h100", help="the GPU to plan for")
    parser.add_argument("--images", action="store_true", help="only recipes of images, sound and video")
    parser.add_argument("--reasons", type=int, default=10, help="how many reasons to show for each version")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        for version, place in checkouts(arguments, Path(folder)):
            kinds = [(path, kind_of(path)) for path in recipes(place)]
            wanted = [(path, kind) for path, kind in kinds if not arguments.images or kind in (IMAGES, OTHER_MEDIA)]
            found = [(kind, outcome(path, arguments.gpu)) for path, kind in wanted]
            planned = Counter(kind for kind, told in found if told == PLANNED)
            texts = [told for kind, told in found if kind not in APART]
            print(f"{version}: {texts.count(PLANNED)} of {len(texts)} recipes of text are planned")
            for kind, count in sorted(Counter(kind for kind, _ in found).items()):
                print(f"  {kind:16} {planned[kind]:4} of {count}")
            listed = {kind for kind, _ in found} - {GYM, "eval"}
            reasons = Counter(told for kind, told in found if told != PLANNED and kind in listed)
            for reason, count in reasons.most_common(arguments.reasons):
                print(f"  {count:5} {reason}")


if __name__ == "__main__":
    main()
