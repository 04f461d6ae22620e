"""Whether the Hugging Face hub can be reached: one bounded attempt, and then offline for the rest of a run.

Without a network, the libraries retry every request several times (huggingface_hub 1.x: five times, with pauses), and a
run asks for models, tokenizers and data one after the other.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time

from rlctl.telemetry.terminal import Verbosity

LIMIT_S = 5.0
ASK_AGAIN_S = 600.0
"""A long-lived program, such as a notebook, asks again after this time."""
OFFLINE = "HF_HUB_OFFLINE"
UNREACHED = "not in the Hugging Face cache, and the hub cannot be reached (or HF_HUB_OFFLINE is set)."
GATEWAY_ERRORS = (502, 503, 504)
CHATTY = ("huggingface_hub.utils._http", "datasets.load", "datasets.utils.file_utils")
"""Loggers that report retries and the use of the cache."""


class _State:
    lock = threading.Lock()
    asked_at: float | None = None
    reason = ""
    """The reason that this module went offline for; empty: it did not."""


def hub_answers() -> bool:
    """Return whether the hub can be asked. The first call tries to reach it, for `LIMIT_S` at most; where it does not
    answer, this process and its children are offline from then on, which one sentence on stderr says."""
    from huggingface_hub import constants

    with _State.lock:
        is_recent = _State.asked_at is not None and time.monotonic() - _State.asked_at < ASK_AGAIN_S
        if not is_recent and (_State.reason or not constants.HF_HUB_OFFLINE):
            if _State.reason:
                _go(online=True)
            _State.reason, _State.asked_at = _unreached(constants.ENDPOINT), time.monotonic()
            if _State.reason:
                _go(online=False)
                if not Verbosity.quiet:
                    message = f"The Hugging Face hub ({constants.ENDPOINT}) cannot be reached: {_State.reason}."
                    print(f"{message} Models and data come from this machine alone.", file=sys.stderr, flush=True)
        return not constants.HF_HUB_OFFLINE


def _go(*, online: bool) -> None:
    """Set offline mode in the libraries, in later imports and in child processes."""
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = not online
    if (datasets := sys.modules.get("datasets.config")) is not None:
        datasets.HF_HUB_OFFLINE = not online  # pyright: ignore[reportAttributeAccessIssue]
    if online:
        os.environ.pop(OFFLINE, None)
        return
    os.environ[OFFLINE] = "1"
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)


def _unreached(endpoint: str) -> str:
    """Return why the hub cannot be reached; empty: it answered. A thread asks, because no timeout bounds a name look-up
    and the client's timeouts hold for each step separately."""
    limit = max(LIMIT_S, float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or 0))
    answers: list[str] = []
    threading.Thread(target=_ask, args=(endpoint, limit, answers), name="hub", daemon=True).start()
    deadline = time.monotonic() + limit
    while not answers and time.monotonic() < deadline:
        time.sleep(0.01)
    return answers[0] if answers else f"it did not answer within {limit:g} s"


def _ask(endpoint: str, limit: float, answers: list[str]) -> None:
    from huggingface_hub.utils import get_session

    try:
        code = get_session().head(endpoint, timeout=limit).status_code
        answers.append(f"it answers with status {code}" if code in GATEWAY_ERRORS else "")
    except Exception as error:  # noqa: BLE001 - whatever a client of the user's own raises
        answers.append(str(error) or type(error).__name__)
