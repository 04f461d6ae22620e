"""A logger: the metrics of each step as lines of a CSV file in the run directory."""

from __future__ import annotations

from collections.abc import Mapping

from rlctl.telemetry.loggers import LoggedRun


class CsvLogger:
    """Lines `step,name,value` in `metrics.csv`. A resumed run appends to the lines of its finished steps."""

    title = "CSV"
    package = "csv"
    install = "rlctl-example"

    def __init__(self, run: LoggedRun) -> None:
        path = run.directory / "metrics.csv"
        lines = path.read_text().splitlines(keepends=True)[1:] if path.exists() else []
        self._file = path.open("w")
        self._file.write("step,name,value\n")
        self._file.writelines(line for line in lines if int(line.partition(",")[0]) <= run.finished)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step."""
        self._file.writelines(f"{step},{name},{value}\n" for name, value in values.items())
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
