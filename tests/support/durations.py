"""CPU seconds of tests: each run records them, `tests/durations.txt` keeps them, and the scheduler reads them.

The table has a line for each function that takes at least a second, and one for each file whose other functions do or
that needs a shared fixture. A test without a line counts as quick. `make durations` adds what the last run recorded.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.cpu_time import CpuClock, slowness

TABLE = Path(__file__).parents[1] / "durations.txt"
PROPERTY = "cpu"
PIECE_S = 30.0
ITEM_LIMIT_S = 5.0
TOTAL_LIMIT_S = 18 * 60.0
"""Nine minutes on two cores that compute all the time. `make test` takes 13 to 17 minutes of it."""
BUSY = 3.0
"""Load average per processor above which other programs make CPU seconds too long to be judged: ranks that wait for
each other poll meanwhile."""
QUICK_S = 0.05
SHARED = ("placement", "pools")
"""Session fixtures that take seconds to start (Ray and the engines; ranks of a policy): their tests stay together."""
MEANT_TO_BE_LONG = ("long", "slow", "gpu")


def file_of(name: str) -> str:
    return name.partition("::")[0]


def function_of(nodeid: str) -> str:
    """Return a test's name without its parameters."""
    return nodeid.partition("[")[0]


@dataclass(frozen=True)
class Entry:
    """A line of the table. The seconds of a file are without the functions that have lines."""

    seconds: float
    shared: str = ""


Table = dict[str, Entry]


def read_table(path: Path = TABLE) -> Table:
    """Return the table, or an empty one. Of two lines for one name, which a merge may leave, the last is taken."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    return {name: Entry(float(seconds), *shared) for name, seconds, *shared in rows}


def write_table(path: Path, table: Table) -> None:
    head = "# CPU seconds by test file and function; `make durations` writes it from the last whole `make test`.\n"
    rows = [f"{name} {entry.seconds:g} {entry.shared}".rstrip() + "\n" for name, entry in sorted(table.items())]
    path.write_text(head + "".join(rows))


@dataclass
class Recorded:
    """CPU seconds that the tests of one run took, without the fixtures that several tests share."""

    items: dict[str, float] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    fixtures: dict[str, float] = field(default_factory=dict)
    long: set[str] = field(default_factory=set)
    slow: set[str] = field(default_factory=set)

    def add(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == PROPERTY and isinstance(value, dict):
                self.items[report.nodeid] = value["seconds"]
                if value["shared"]:
                    self.shared[file_of(report.nodeid)] = value["shared"]
                if value["marks"]:
                    self.long.add(report.nodeid)
                if set(value["marks"]) & {"slow", "gpu"}:
                    self.slow.add(report.nodeid)
                for fixture, seconds in value["fixtures"].items():
                    self.fixtures[fixture] = self.fixtures.get(fixture, 0.0) + seconds

    def table(self, before: Table) -> Table:
        """Return the table with the numbers of this run. One that hardly changed stays as it was."""
        by_function: dict[str, float] = {}
        for nodeid, seconds in self.items.items():
            by_function[function_of(nodeid)] = by_function.get(function_of(nodeid), 0.0) + seconds
        lines = {file_of(name): 0.0 for name in by_function}
        for name, seconds in by_function.items():
            line = name if round(seconds) else file_of(name)
            lines[line] = lines.get(line, 0.0) + seconds
        kept = {name: entry for name, entry in before.items() if name not in by_function and self._remains(name, lines)}
        return kept | {
            name: Entry(steady(seconds, before.get(name)), self.shared.get(name, ""))
            for name, seconds in lines.items()
            if round(seconds) or name in self.shared
        }

    @staticmethod
    def _remains(name: str, files: Iterable[str]) -> bool:
        """Return whether a line without a measurement in this run still belongs to an existing test."""
        file, _, function = name.partition("::")
        path = TABLE.parents[1] / file
        return path.exists() and (f"def {function}(" in path.read_text() if function else file not in files)

    def too_long(self, slowness: float) -> list[tuple[float, str]]:
        """Return the unmarked tests over the limit, longest first, in seconds of the reference processor."""
        rows = [(seconds / slowness, nodeid) for nodeid, seconds in self.items.items() if nodeid not in self.long]
        return sorted((row for row in rows if row[0] > ITEM_LIMIT_S), reverse=True)


def steady(seconds: float, before: Entry | None) -> float:
    if before and before.seconds / 1.5 - 1 <= seconds <= before.seconds * 1.5 + 1:
        return before.seconds
    return round(seconds)


def seconds_of(collection: Iterable[str], table: Table) -> dict[str, float]:
    """Return the expected seconds of each test: an equal share of the line of its function or of its file."""
    names = {nodeid: function_of(nodeid) for nodeid in collection}
    lines = {nodeid: name if name in table else file_of(name) for nodeid, name in names.items()}
    counts: dict[str, int] = {}
    for line in lines.values():
        counts[line] = counts.get(line, 0) + 1
    return {
        nodeid: max(QUICK_S, table[line].seconds / counts[line] if line in table else 0.0)
        for nodeid, line in lines.items()
    }


@dataclass(frozen=True)
class Piece:
    """Tests that one process runs in one go."""

    tests: tuple[str, ...]
    shared: str
    seconds: float


def pieces(collection: list[str], table: Table) -> list[Piece]:
    """Return the collection in pieces of at most `PIECE_S` seconds, longest first. Only a file that takes longer is
    cut; tests that share a fixture keep their order."""
    seconds = seconds_of(collection, table)
    files: dict[str, list[str]] = {}
    for nodeid in collection:
        files.setdefault(file_of(nodeid), []).append(nodeid)
    made: list[Piece] = []
    rooms: dict[tuple[str, str], list[list[str]]] = {}
    for file, tests in files.items():
        shared = table[file].shared if file in table else ""
        whole = sum(seconds[test] for test in tests) <= PIECE_S
        rooms.setdefault((shared, str(Path(file).parent)), []).extend([tests] if whole else [[test] for test in tests])
    for (shared, _), units in rooms.items():
        part: list[str] = []
        for unit in units:
            if part and sum(seconds[test] for test in [*part, *unit]) > PIECE_S:
                made.append(Piece(tuple(part), shared, sum(seconds[test] for test in part)))
                part = []
            part += unit
        made.append(Piece(tuple(part), shared, sum(seconds[test] for test in part)))
    return sorted(made, key=lambda piece: (not piece.shared, 0.0 if piece.shared else -piece.seconds))


class DurationsPlugin:
    """Measures in each process that runs tests; collects and judges in the process that was started."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.clock, self.recorded = config, CpuClock(), Recorded()
        self.judges = not hasattr(config, "workerinput")
        self.slowness = slowness() if self.judges else 1.0
        self.test_end = self.clock.seconds()
        self.fixtures: dict[str, float] = {}
        self.in_fixture = False
        self.problems: list[str] = []
        self.busy = False
        self.files: set[Path] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[None]:
        """Measure what several tests share."""
        if self.in_fixture or fixturedef.scope == "function":
            return (yield)
        start, self.in_fixture = self.clock.seconds(), True
        try:
            return (yield)
        finally:
            self.in_fixture = False
            name = f"{fixturedef.baseid}::{fixturedef.argname}"
            self.fixtures[name] = self.fixtures.get(name, 0.0) + self.clock.seconds() - start

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
        """Measure a test up to its end; what follows may be the end of fixtures that others used."""
        report = yield
        if call.when == "teardown":
            if call.duration > QUICK_S:  # a look at all processes takes a millisecond
                self.test_end = self.clock.seconds()
            self.fixtures = {}
        elif call.when == "call" or call.excinfo:
            names, start = getattr(item, "fixturenames", ()), self.test_end
            self.test_end = self.clock.seconds()
            report.user_properties.append((PROPERTY, {
                "seconds": round(self.test_end - start - sum(self.fixtures.values()), 3),
                "fixtures": self.fixtures,
                "shared": next((name for name in SHARED if name in names), ""),
                "marks": [name for name in MEANT_TO_BE_LONG if item.get_closest_marker(name)] or self._starts(item),
            }))  # fmt: skip
        return report

    def _starts(self, item: pytest.Item) -> list[str]:
        """Return a mark for the first test of a file on engines or ranks, which may wait for their imports."""
        first = item.path not in self.files and set(SHARED) & set(getattr(item, "fixturenames", ()))
        self.files.add(item.path)
        return ["starts"] if first else []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.judges and report.when != "teardown":
            self.recorded.add(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self.judges or not self.recorded.items:
            return
        if self.config.pluginmanager.has_plugin("cacheprovider"):
            write_table(self.config.cache.mkdir("durations") / TABLE.name, self.recorded.table(read_table()))
        if self._ran_whole() and session.exitstatus in (0, 1):
            self.problems = self._over_limits()
            if not self.busy:
                session.exitstatus = session.exitstatus or int(bool(self.problems))

    def _ran_whole(self) -> bool:
        option = self.config.option
        # `.ci/run` adds the guards, and runs beside other programs.
        chosen = (
            option.keyword
            or option.collectonly
            or "guard" in option.markexpr
            or getattr(option, "lf", False)
            or getattr(option, "deselect", [])
        )
        return self.config.args_source == pytest.Config.ArgsSource.TESTPATHS and not chosen

    def _over_limits(self) -> list[str]:
        self.slowness = (self.slowness + slowness()) / 2
        self.busy = is_busy(os.getloadavg()[1], os.cpu_count() or 1)
        long = [
            f"{seconds:.1f} CPU seconds, over {ITEM_LIMIT_S:g}: {nodeid}"
            for seconds, nodeid in self.recorded.too_long(self.slowness)
        ]
        if long:
            long.append("Make it smaller, read a run of the crew (tests/support/crew.py), or mark it slow or long.")
        total = self._total() / self.slowness
        if total > TOTAL_LIMIT_S:
            long.append(f"{total:.0f} CPU seconds in all, over {TOTAL_LIMIT_S:g}: mark what is exhaustive slow.")
        return long

    def _total(self) -> float:
        """Return the CPU seconds of all processes, without the tests that `make test` leaves out."""
        return self.clock.seconds() - sum(self.recorded.items[nodeid] for nodeid in self.recorded.slow)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.judges or not self.recorded.items:
            return
        shared = sum(self.recorded.fixtures.values())
        terminalreporter.write_line(
            f"CPU: {self.clock.seconds():.0f} s, of which tests {sum(self.recorded.items.values()):.0f} s and shared "
            f"fixtures {shared:.0f} s; this processor takes {self.slowness:.2f} times the reference's time"
        )
        if self.busy and self.problems:
            terminalreporter.write_line("Other programs are running, so these are no failures:")
        for problem in self.problems:
            terminalreporter.write_line(problem, red=not self.busy)


def is_busy(load: float, processors: int) -> bool:
    return load > BUSY * processors


def make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return the scheduler of pieces. A piece that needs a shared fixture waits for the process that has it while
    other pieces remain."""
    from xdist.scheduler import LoadScopeScheduling

    class ByPiece(LoadScopeScheduling):
        def __init__(self) -> None:
            super().__init__(config, log)
            self.pieces: dict[str, Piece] = {}
            self.piece_of: dict[str, str] = {}
            self.holders: dict[str, Any] = {}

        def add_node_collection(self, node: Any, collection: Any) -> None:
            if not self.pieces:
                self.pieces = {
                    str(number): piece for number, piece in enumerate(pieces(list(collection), read_table()))
                }
                self.piece_of = {test: name for name, piece in self.pieces.items() for test in piece.tests}
            super().add_node_collection(node, collection)

        def remove_node(self, node: Any) -> str | None:
            """A test that ended its process fails once; xdist would give it to the next process."""
            self.holders = {fixture: holder for fixture, holder in self.holders.items() if holder is not node}
            units = self.assigned_work[node].values()
            pending = ((unit, test) for unit in units for test, completed in unit.items() if not completed)
            unit, ended = next(pending, ({}, None))
            if ended is not None:
                unit[ended] = True
            super().remove_node(node)
            return ended

        def _split_scope(self, nodeid: str) -> str:
            return self.piece_of[nodeid]

        def _assign_work_unit(self, node: Any) -> None:
            name = min(self.workqueue, key=lambda name: self._rank(node, name))
            self.holders.setdefault(self.pieces[name].shared, node)
            self.workqueue.move_to_end(name, last=False)
            super()._assign_work_unit(node)

        def _rank(self, node: Any, name: str) -> tuple[int, int]:
            shared = self.pieces[name].shared
            holder = self.holders.get(shared) if shared else None
            busy = any(held is node for other, held in self.holders.items() if other)
            if holder is node:
                order = 0
            elif shared and holder is None:
                order = 3 if busy else 1
            else:
                order = 4 if shared else 2
            return order, int(name)

    return ByPiece()
