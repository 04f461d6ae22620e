"""The report of runs: what it shows, and that nothing of a run can break it."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rlctl.report.page import duration, page, write_page
from rlctl.report.reported_run import Forecast, ReportedRun
from rlctl.telemetry.phases import Phase

VOID = {"meta", "path", "circle", "rect", "br"}


def line(step: int, **more: Any) -> dict[str, Any]:
    seconds = dict.fromkeys((phase.value for phase in Phase), 0.5)
    return {
        "step": step, "reward_mean": 0.2 + step / 10, "accuracy": 0.5, "response_tokens_mean": 20.0 - step, "lr": 1e-6,
        "truncated_fraction": 0.25, "entropy": 1.5 - step / 100, "grad_norm": 2.0, "tokens_per_s": 100.0,
        "logprob_diff": {"mean": 2e-7 * step, "max": 1e-6 * step}, "validation": {"accuracy": step / 10},
        "seconds": {**seconds, "total": 3.5}, "refit_seconds": {"pack": 0.1}, "system": {"memory_gib": 9.5 + step},
        **more,
    }  # fmt: skip


def run(**more: Any) -> ReportedRun:
    found = {"name": "a run", "lines": [line(step) for step in range(1, 7)], "steps": 12, "state": "running"}
    return ReportedRun(**{**found, **more})


class Reader(HTMLParser):
    """The tags and the text of a page; every tag that is opened is to be closed where HTML asks for it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in VOID and tag != "li":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID and tag != "li":
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def captions(text: str) -> list[str]:
    return re.findall(r"<figcaption>(.*?)(?: <b>|</figcaption>)", text)


def test_tiles_tell_how_the_run_stands() -> None:
    shown = " ".join(Reader(page([run()])).texts)
    for part in (
        "running, step 6 of 12", "training reward 0.750 ± 0.050 in steps 5 to 6; 0.350 ± 0.050 in steps 1 to 2",
        "validation accuracy 0.600 after step 6; 0.100 after step 1", "training response tokens 14.5 ± 0.5",
        "training share cut off 0.250 ± 0.000", "steps 6 of 12", "time left 21 s 3.5 s a step", "tokens/s 100",
        "memory 15.5 GiB",
    ):  # fmt: skip
        assert part in shown, part
    assert "time 21 s" in " ".join(Reader(page([run(state="finished")])).texts)


def test_the_gpu_and_the_node_that_are_slowest_most_often_are_named() -> None:
    slow = [{"slowest_gpu": f"node-b GPU {gpu}", "slowest_node": "node-b"} for gpu in (3, 3, 5)]
    lines = [line(step, system=one) for step, one in enumerate((*slow, {"memory_gib": 9.5}), start=1)]
    shown = " ".join(Reader(page([run(lines=lines)])).texts)
    assert "slowest GPU node-b GPU 3 in 2 of 3 steps, by its clock" in shown
    assert "slowest node node-b in 3 of 3 steps, by its clock" in shown
    assert "slowest" not in " ".join(Reader(page([run()])).texts)


def test_every_metric_has_one_panel_and_diagnostics_are_folded() -> None:
    text = page([run(titles={"logprob_diff/max": "largest difference"})])
    found = captions(text)
    assert len(found) == len(set(found))
    main, _, folded = text.partition("<summary>Diagnostics")
    assert "mean reward" in captions(main)
    assert "validation: accuracy" in captions(main)
    assert "largest difference" in captions(main)  # the method declares it
    assert "memory of the node" in captions(folded)
    assert "lr = 1e-6" in folded  # it never changed
    assert "refit" not in " ".join(found)


def test_validations_show_their_scores_also_from_before_the_first_step() -> None:
    lines = [line(step, validation={}) for step in range(1, 7)]
    lines[0]["validation_at_start"] = {"accuracy": 0.25, "accuracy_stderr": 0.1, "reward_mean": 0.25}
    for step in (3, 6):
        lines[step - 1]["validation"] = {"accuracy": 0.5, "accuracy_stderr": step / 60, "reward_mean": 0.5}
    shown = run(lines=lines)
    assert shown.points("validation/accuracy") == [(0, 0.25), (3, 0.5), (6, 0.5)]
    text = page([shown])
    shown = " ".join(Reader(text).texts)
    assert "validation accuracy 0.500 ± 0.100 after step 6; 0.250 ± 0.100 before step 1" in shown
    assert "validation reward 0.500 after step 6; 0.250 before step 1" in shown
    main, _, folded = text.partition("<summary>Diagnostics")
    assert "validation: accuracy; validation: reward mean" in captions(main)
    assert [one for one in captions(folded) if one.startswith("validation")] == ["validation: accuracy stderr"]
    assert "validation at start" not in text


def test_metrics_of_the_same_values_share_a_panel() -> None:
    lines = [
        line(step, accuracy=0.2 + step / 10, reward_terms={"task": 0.2 + step / 10}, validation={})
        for step in range(1, 7)
    ]
    text = page([run(lines=lines)])
    assert captions(text)[0] == "mean reward; accuracy; reward terms: task"
    assert "accuracy" not in captions(text)
    assert "accuracy</dt>" not in text


def test_a_page_is_whole_and_needs_nothing_else() -> None:
    text = page([run(messages=["a <b> & c"], samples=[(1, [{"prompt": "<script>", "completion": "</pre>x"}])])])
    assert not Reader(text).open
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert not re.findall(r"(?:src|href|url\()[=\"'(]", text)
    assert "prefers-color-scheme:dark" in text
    assert "@media print" in text
    assert "width=device-width" in text


def test_what_was_run_and_what_the_run_said_are_there() -> None:
    text = page([
        run(
            identity=[("command", "rlctl train grpo"), ("model", "tiny")], facts=[("machine", "1 node")],
            settings=[("optimizer.lr", "1e-5", "--lr")],
            forecasts=[Forecast("generation", "s", 2.0, 1.6)],
            samples=[(3, [{"prompt": "1+1?", "completion": "2", "reward": 1.0, "answer": "2", "truncated": True}])],
            messages=["12:00 run: x", "12:01 Warning, step 3: they differ"],
        )
    ])  # fmt: skip
    shown = " ".join(Reader(text).texts)
    for part in ("command rlctl train grpo", "optimizer.lr 1e-5 --lr", "generation 2.00 s 1.60 s 0.80", "Step 3"):
        assert part in shown
    assert "reward 1; answer 2; cut off" in shown
    trouble = text.partition("To look at")[2].partition("</section>")[0]
    assert "they differ" in trouble
    assert "run: x" not in trouble
    assert "generation 3.0 0.50 14.3%" in shown


def test_several_runs_are_on_one_page_with_what_differs() -> None:
    first = run(name="first", config={"optimizer.lr": "1e-5", "run.seed": "1", "run.dir": '"a"'})
    second = run(name="second", lines=[line(1), line(2, kl=0.5)], config={"optimizer.lr": "1e-6", "run.seed": "1"})
    text = page([first, second])
    shown = " ".join(Reader(text).texts)
    assert "training reward 0.350 ± 0.050 in steps 1 to 2 → 0.750 ± 0.050 in steps 5 to 6 0.300 in step 1 → " in shown
    assert "optimizer.lr 1e-5 1e-6" in shown
    assert "run.seed" not in shown
    assert "run.dir" not in shown
    assert "Rows and panels are separate" not in shown
    assert "<title>second</title>" in text  # the name of each line
    assert len(captions(text)) == len(set(captions(text)))


def test_what_was_measured_in_another_way_does_not_stand_side_by_side() -> None:
    config = {"generation.max_new_tokens": "16", "optimizer.lr": "1e-5"}
    short, also = run(name="short", config=config), run(name="also", config=config | {"optimizer.lr": "1e-6"})
    long = run(name="long", config=config | {"generation.max_new_tokens": "64"})
    lines = [line(step, validation={"reward_mean": 0.5, "reward_stderr": 0.1}) for step in (1, 2)]
    validating = run(name="validating", config=config | {"validation.every": "1"}, lines=lines)
    text = page([short, also, long, validating])
    table = text.partition("<h2>Side by side</h2>")[2].partition("</section>")[0]
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in table.split("<tr>")]
    labelled = {row[0]: [cell.rpartition("→ ")[2][:5] for cell in row[1:]] for row in rows if row}
    assert labelled["training reward of short, also, validating"] == ["0.750", "0.750", "-", "0.400"]
    assert labelled["training reward of long"] == ["-", "-", "0.750", "-"]
    assert labelled["validation reward of validating"] == ["-", "-", "-", "0.500"]
    assert "Rows and panels are separate" in table
    assert "They differ in: whether the run validates, " in table
    assert "generation.max_new_tokens" in table
    assert "optimizer.lr" not in table
    assert {"mean reward of short, also, validating", "mean reward of long", "entropy"} <= set(captions(text))


def test_runs_that_differ_in_their_seed_alone_are_one_line_with_a_band() -> None:
    def of(seed: int, name: str = "", **more: str) -> ReportedRun:
        lines = [line(step, reward_mean=seed + step / 10, validation={}) for step in range(1, 7)]
        config = {"run.seed": str(seed), "run.dir": name, "optimizer.lr": "1e-5", **more}
        return run(name=name or f"seed {seed}", lines=lines, config=config)

    text = page([of(0), of(1), of(2, "other", **{"optimizer.lr": "1e-6"})])
    shown = " ".join(Reader(text).texts)
    assert "seed 0, seed 1 (2 seeds) other" in shown
    assert "The band reaches from the lowest to the highest" in shown
    # (0.55 + 1.55) / 2, and the standard error over the two seeds
    assert "→ 1.050 ± 0.500 in steps 5 to 6, 2 seeds" in shown
    assert "run.seed 0, 1 2" in shown
    assert text.count(' band"') > 5
    assert ' band"' not in page([of(0), of(2, "other", **{"optimizer.lr": "1e-6"})])
    assert "seeds" not in page([of(0), of(0, "again")])  # the same seed twice is not a band


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("1 + 1?", ["prompt", "1 + 1?", "completion", "2"]),
        (
            [{"role": "system", "content": "Be brief."},
             {"role": "user", "content": [{"type": "text", "text": "1 + 1?"}, {"type": "image"}]}],
            ["system", "Be brief.", "user", "1 + 1?\n[image]", "assistant", "2"],
        ),
        (
            [{"role": "user", "content": "1 + 1?"},
             {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": [1, 1]}}]},
             {"role": "tool", "content": "2"}],
            ["user", "1 + 1?", "assistant", "add([1, 1])", "tool", "2", "assistant", "2"],
        ),
    ],
)  # fmt: skip
def test_a_sample_is_a_conversation(prompt: Any, expected: list[str]) -> None:
    row = {"prompt": prompt, "completion": "2", "answer": {"value": 2}, "rendered": "<user>1 + 1?"}
    text = page([run(samples=[(1, [row])])]).partition("<article>")[2].partition("</article>")[0]
    assert Reader(text.partition("<p>")[0]).texts == expected
    assert 'answer {"value": 2}' in html.unescape(text)
    assert "The prompt as the model saw it" in text
    assert "'role'" not in text


def test_curves_of_sources_have_their_names_without_folders() -> None:
    values = [{"a/my_envs.py:Game": {"turns_mean": step / 9}, "b": {"reward_mean": step / 8}} for step in (1, 2, 3)]
    checked = [{f"sources/{source}/{name}": of[name] for source, of in each.items() for name in of} for each in values]
    lines = [
        line(step, sources=each, validation=seen)
        for step, (each, seen) in enumerate(zip(values, checked, strict=True), 1)
    ]
    found = captions(page([run(lines=lines)]))
    for name in ("turns mean of my_envs.py:Game", "reward mean of b"):
        assert any(name in caption and f"validation: {name}" in caption for caption in found)


def test_axes_have_units() -> None:
    text = page([run(lines=[line(step, reward_terms={"b.py:brief": step / 9}) for step in (1, 2, 3)])])
    assert "reward terms: b.py:brief" in captions(text)
    units = {
        "mean reward": "reward", "accuracy": "share", "response tokens, mean": "tokens", "entropy": "nats",
        "tokens/s, saving left out": "tokens/s", "memory of the node": "GiB", "seconds a step": "s",
    }  # fmt: skip
    for figure in text.split("<figure>")[1:]:
        found = re.findall(r"<text[^>]*>(.*?)</text>", figure)
        caption = re.findall(r"<figcaption>(.*?)(?: <b>|</figcaption>|;)", figure)[0]
        assert found[0] == units.get(caption, found[0])
        assert found[1] == "step"


def test_a_run_that_has_taken_no_step_says_so() -> None:
    text = page([run(lines=[], state="running", messages=["starting"], identity=[("model", "tiny")])])
    assert not Reader(text).open
    assert "running, no step finished yet" in text
    assert "tiny" in text


@pytest.mark.parametrize(
    "lines",
    [
        [line(1, reward_mean=None, accuracy=None, response_tokens_mean=1e300, grad_norm=None, tokens_per_s=0)],
        [{"step": 1, "seconds": {**dict.fromkeys((phase.value for phase in Phase), 0.0), "total": 0.0}}],
        [{"step": 1}],
        [line(1, label="text", flag=True, reward_mean=-1e300), line(2, reward_mean=1e300)],
        [line(1, loss=float("inf"), grad_norm=float("nan")), line(2, loss=1.0, grad_norm=float("-inf"))],
    ],
)
def test_a_report_is_made_of_odd_metrics(lines: list[dict[str, Any]]) -> None:
    text = page([run(lines=lines), run(name="other", lines=lines)]) + page([run(lines=lines)])
    assert "nan" not in text
    assert "inf" not in text


def test_the_page_of_a_long_run_stays_small() -> None:
    assert len(page([run(lines=[line(step, reward_mean=step % 7 / 7) for step in range(1, 5001)])])) < 400_000


def test_a_reader_never_sees_a_part_of_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    write_page(path, [run()])
    before = path.read_text()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_page(path, [run(name="another")])
    assert path.read_text() == before


def test_times_are_said_as_a_person_would() -> None:
    assert [duration(s) for s in (45, 99.4, 720, 12_000, 190_000)] == [
        "45 s", "99 s", "12 min", "3 h 20 min", "2 d 4 h",
    ]  # fmt: skip
