"""The pieces of work that tests are divided into, and the limits of `make test`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.durations import ITEM_LIMIT_S, PIECE_S, PROPERTY, Entry, Recorded, is_busy, pieces, read_table, write_table

NAMES = [f"tests/room/test_{file}.py::test_it[{number}]" for file in "abc" for number in range(6)]
TABLE = {
    "tests/room/test_a.py::test_it": Entry(60),
    "tests/room/test_b.py": Entry(20),
    "tests/room/test_c.py": Entry(3),
}


def test_pieces_hold_every_test_once_and_only_a_long_file_is_cut() -> None:
    made = pieces(NAMES, TABLE)
    assert sorted(test for piece in made for test in piece.tests) == sorted(NAMES)
    assert all(piece.seconds <= PIECE_S for piece in made)
    assert [len(piece.tests) for piece in made] == [3, 3, 12]
    assert [round(piece.seconds) for piece in made] == [30, 30, 23]


def test_pieces_keep_tests_with_a_shared_fixture_apart_and_first() -> None:
    made = pieces(NAMES, TABLE | {"tests/room/test_c.py": Entry(3, "placement")})
    assert [(piece.shared, len(piece.tests)) for piece in made] == [("placement", 6), ("", 3), ("", 3), ("", 6)]


def report(name: str, seconds: float, *marks: str) -> pytest.TestReport:
    measured = {"seconds": seconds, "fixtures": {"f": 1.5}, "shared": "", "marks": marks}
    return pytest.TestReport(name, (name, 0, name), {}, "passed", None, "call", user_properties=[(PROPERTY, measured)])


def test_limit_is_for_unmarked_tests_in_seconds_of_the_reference() -> None:
    recorded = Recorded()
    recorded.add(report("tests/test_a.py::test_quick", ITEM_LIMIT_S))
    recorded.add(report("tests/test_a.py::test_more", 1.5 * ITEM_LIMIT_S))
    recorded.add(report("tests/test_a.py::test_run", 9 * ITEM_LIMIT_S, "long"))
    assert recorded.too_long(1.0) == [(1.5 * ITEM_LIMIT_S, "tests/test_a.py::test_more")]
    assert recorded.too_long(1.5) == []


def test_limits_are_judged_where_no_other_programs_run() -> None:
    assert [is_busy(load, 2) for load in (2.0, 6.0, 6.1)] == [False, False, True]


def test_table_keeps_numbers_that_hardly_changed_and_tests_that_did_not_run(tmp_path: Path) -> None:
    here = "tests/test_durations.py"
    unrun, gone = f"{here}::test_clock_counts_processes_that_nobody_waits_for", f"{here}::test_of_another_day"
    before = {f"{here}::test_steady": Entry(10), unrun: Entry(4), gone: Entry(4)}
    recorded = Recorded()
    recorded.add(report(f"{here}::test_steady[1]", 6.0))
    recorded.add(report(f"{here}::test_steady[2]", 6.0))
    recorded.add(report(f"{here}::test_quick", 0.3))
    recorded.add(report(f"{here}::test_new", 7.2))
    table = recorded.table(before)
    assert table == {f"{here}::test_steady": Entry(10), unrun: Entry(4), f"{here}::test_new": Entry(7)}
    write_table(tmp_path / "table", table)
    assert read_table(tmp_path / "table") == table


def test_clock_counts_processes_that_nobody_waits_for() -> None:
    """The child ignores SIGCHLD, so the kernel keeps no times of the grandchild, and tells its own here. The clock runs
    in a process of its own, since Ray and pools of other tests compute beside this one."""
    busy = "import time\nwhile time.process_time() < 1.5: pass"
    child = (
        f"import signal, subprocess, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        f"subprocess.Popen([sys.executable, '-c', {busy!r}]).wait()"
    )
    code = (
        f"import os, subprocess, sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"from support.cpu_time import CpuClock; clock = CpuClock(); before = clock.seconds()\n"
        f"subprocess.run([sys.executable, '-c', {child!r}], check=True)\n"
        f"print(clock.seconds() - before, os.times().children_user)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    counted, reaped = map(float, done.stdout.split())
    assert reaped < 1.0
    assert 0.9 < counted < 3.0
