"""Tables whose rows are cheap: one test checks all of them and lists each that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def every_row(rows: Iterable[Any], check: Callable[..., None]) -> None:
    """Call `check` with each row, or the parts of a row that is a tuple; fail with all rows that did not pass."""
    failed, count = [], 0
    for count, row in enumerate(rows, 1):  # noqa: B007 - counted for the message
        try:
            check(*row) if isinstance(row, tuple) else check(row)
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - whatever it is, the row is listed
            failed.append(f"{row!r:.200}\n    {type(error).__name__}: {error}")
    assert count, "The table has no rows."
    assert not failed, f"{len(failed)} of {count} rows fail:\n" + "\n".join(failed)
