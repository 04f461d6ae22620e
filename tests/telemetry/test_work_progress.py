"""Progress of long work: a bar in a terminal, lines in a log, and a rate that counts this process alone."""

from __future__ import annotations

import pytest

from rlctl.telemetry import work_progress as progress
from rlctl.telemetry.work_progress import WorkProgress


def test_a_log_gets_a_line_now_and_then_and_one_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([0.0, 10.0, 40.0, 50.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    with WorkProgress("samples", 100, done=20) as work:
        for count in (10, 50, 20):
            work.advance("model, task", count)
    assert capsys.readouterr().err.splitlines() == [
        "model, task: 80 of 100 samples, 1.5 a second, 13 s left",
        "model, task: 100 of 100 samples, 1.6 a second",
    ]


def test_a_terminal_gets_a_bar_with_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    out = io.StringIO()
    out.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", out)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with WorkProgress("samples", 10) as work:
        work.advance("model, task", 4)
    assert "4/10" in out.getvalue()
    assert "samples/s" in out.getvalue()
    assert "left" in out.getvalue()
