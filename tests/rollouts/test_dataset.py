"""Rows of a dataset as texts to train on: which stand next to each other, and which numbers they may hold."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlctl.data.texts import TrainedText
from rlctl.errors import InputError
from rlctl.methods.available import config_class, method_from_config
from rlctl.rollouts.dataset import HeldOutTexts, ScoredTexts, TextStream

PAIR = {"prompt": "Say a", "chosen": "aaa", "rejected": "aaz"}
Open = Callable[..., TextStream]


@pytest.fixture
def opened(tiny_llama: Path, tmp_path: Path) -> Open:
    def of(rows: list[dict[str, Any]], kind: type[TextStream] = TextStream, **sections: Any) -> TextStream:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        own = "kto" if "label" in rows[0] else "rm" if kind is ScoredTexts else "dpo"
        sections = {key: value for key, value in sections.items() if key != "preference" or own == "dpo"}
        run = {"algorithm": own, **sections.pop("run", {})}
        config = config_class(own).model_validate({"data": {"name": str(path)}, "run": run, **sections})
        stream = method_from_config(config, tries_loss=False).open_data(tiny_llama)
        assert isinstance(stream, kind)
        stream.limit, of.config = 64, config  # type: ignore[attr-defined]
        return stream

    return of


def labels(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"p{n}", "completion": f"c{n}", "label": n % 2 == 0} for n in range(count)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("count", range(1, 8))
def test_next_to_each_completion_stands_that_of_another_row(
    opened: Open, tiny_llama: Path, count: int, seed: int
) -> None:
    """KTO (2402.01306), section 4.1: z0 is estimated by completions of other prompts, in validation too."""
    stream = opened(labels(8), validation={"holdout": count, "at_end": True}, run={"seed": seed})
    held = HeldOutTexts.open(opened.config, stream, tiny_llama)  # type: ignore[attr-defined]
    assert held is not None
    trained = [stream.datasets[0].prompts[index] for index in range(8 - count)]
    for of, rows in ((stream, trained), (held.stream, held.rows)):
        if len(rows) == 1 and of is stream:
            with pytest.raises(InputError, match=r"every row of .*rows.jsonl has this prompt.*at least two prompts"):
                of.texts(rows[0])
            continue
        others = set()
        for row in rows:
            own, other = (text.tokens_T.tolist() for text in of.texts(row))
            assert own != other
            others.add(tuple(other[-3:]))
        assert len(others) == len(rows)  # each stands next to one


def learned(text: TrainedText) -> list[int]:
    return text.tokens_T[text.mask_T].tolist()


LABELED_FILES = {
    "samples of each prompt": ["a", "a", "a", "b", "b", "c"],
    "pairs, first and last row alike": ["a", "b", "b", "c", "c", "a"],
    "white space": ["a b", "a  b", "a b ", "c", "d", "d"],
    "messages": [[{"role": "user", "content": text}] for text in "aabbcc"],
}


@pytest.mark.parametrize("prompts", LABELED_FILES.values(), ids=LABELED_FILES)
def test_kto_compares_a_completion_with_the_next_one_of_another_prompt(opened: Open, prompts: list[Any]) -> None:
    """KTO (2402.01306), equation 8: y' is of another prompt than x. The rule is written out here in a second form."""
    rows = [{"prompt": prompt, "completion": f"c{n}", "label": n % 2 == 0} for n, prompt in enumerate(prompts)]
    stream, same = opened(rows), [" ".join(str(prompt).split()) for prompt in prompts]
    read = [stream.datasets[0].prompts[n] for n in range(len(rows))]
    for n, row in enumerate(read):
        expected = min((m for m in range(len(rows)) if same[m] != same[n]), key=lambda m: (m - n) % len(rows))
        own, other = stream.texts(row)
        assert learned(own) == learned(stream.texts(read[n])[0])
        assert learned(other) == learned(stream.texts(read[expected])[0])


def test_a_held_out_completion_of_kto_is_compared_with_another_prompt_of_the_data(
    opened: Open, tiny_llama: Path
) -> None:
    rows = [{"prompt": "a", "completion": f"c{n}", "label": True} for n in range(5)]
    rows += [{"prompt": "b", "completion": "other", "label": True}]
    for seed in range(6):  # also where the held-out row has the prompt of all but one
        stream = opened(rows, validation={"holdout": 1, "at_end": True}, run={"seed": seed})
        held = HeldOutTexts.open(opened.config, stream, tiny_llama)  # type: ignore[attr-defined]
        assert held is not None
        (row,) = held.rows
        if row.prompt == "b":
            continue
        other = next(one for one in map(stream.datasets[0].prompts.__getitem__, range(5)) if one.prompt == "b")
        assert learned(held.stream.texts(row)[1]) == learned(stream.texts(other)[0])


def test_kto_refuses_data_of_one_prompt(opened: Open) -> None:
    stream = opened([{"prompt": "a", "completion": f"c{n}", "label": n % 2 == 0} for n in range(4)])
    with pytest.raises(InputError, match=r"every row of .*rows.jsonl has this prompt.*two prompts"):
        stream.require_fit()


BAD = [float("nan"), float("inf"), -float("inf"), 1e300, 10**400, "much", True]


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("field", ["margin", "ref_chosen_logps", "ref_rejected_logps"])
def test_a_number_that_is_none_is_named_before_the_run(opened: Open, tiny_llama: Path, field: str, value: Any) -> None:
    logps = {"ref_chosen_logps": -2.0, "ref_rejected_logps": -3}
    good: Mapping[str, Any] = PAIR | ({"margin": 0.5} if field == "margin" else logps)
    kind = ScoredTexts if field == "margin" else TextStream
    sections = {"preference": {"precompute": field != "margin"}, "validation": {"holdout": 1, "at_end": True}}
    stream = opened([dict(good)] * 6, kind, **sections)
    stream.require_fit()
    rows = [dict(good)] * 4 + [good | {field: value}] + [dict(good)]
    message = rf"rows.jsonl, line 5: the field '{field}' is .*not a finite number"
    with pytest.raises(InputError, match=message):
        opened(rows, kind, preference=sections["preference"]).require_fit()
    stream = opened([rows[4]] * 4, kind, **sections)
    held = HeldOutTexts.open(opened.config, stream, tiny_llama)  # type: ignore[attr-defined]
    assert held is not None
    with pytest.raises(InputError, match=rf"line \d: the field '{field}' is"):
        held.fitted(64, 64)
    unused = opened(rows)  # neither a margin nor log-probs are read
    unused.require_fit()


def test_one_of_two_log_probs_is_named_as_missing(opened: Open) -> None:
    rows = [PAIR | {"ref_chosen_logps": -2.0}]
    with pytest.raises(InputError, match="the field 'ref_rejected_logps' is missing"):
        opened(rows, preference={"precompute": True}).require_fit()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_preferences_that_are_no_numbers_order_nothing(opened: Open, value: float) -> None:
    ranked = {"context": "q", "completions": [{"rank": 1, "completion": "a"}, {"rank": value, "completion": "b"}]}
    steered = {"context": "q", "response1": "a", "response2": "b", "overall_preference": value}
    for row, field in ((ranked, "rank of a completion"), (steered, "'overall_preference' is not a number")):
        with pytest.raises(InputError, match=field):
            opened([row]).require_fit()
