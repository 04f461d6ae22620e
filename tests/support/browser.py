"""A headless Chromium that tests steer over the DevTools protocol, without a driver or further packages."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
REPORTED = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
TIMEOUT_S = 60.0


def installed_browser() -> str | None:
    """Return the path of an installed Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A page of a running Chromium. `messages` collects what pages log, and errors of their scripts."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers, self._read, self._number = commands, answers, b"", 0
        self._session: str | None = None
        self.messages: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Return the result of a DevTools command. Raises AssertionError with the browser's words if it fails."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        answer = self._until(lambda found: found.get("id") == self._number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def open(self, address: str, width: int, height: int, scheme: str = "light") -> None:
        """Load a page in a window of a size, with light or dark colors."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Page.navigate", url=address)
        self._until(lambda found: found.get("method") == "Page.loadEventFired")

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self, path: Path) -> None:
        """Write a picture of the whole page."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _until(self, matches: Any) -> dict[str, Any]:
        limit = time.monotonic() + TIMEOUT_S
        while True:
            while b"\0" in self._read:
                text, _, self._read = self._read.partition(b"\0")
                message = json.loads(text)
                if message.get("method") in REPORTED:
                    self.messages.append(message["params"])
                if matches(message):
                    return message
            ready, _, _ = select.select([self._answers], [], [], max(0.0, limit - time.monotonic()))
            part = os.read(self._answers, 1 << 16) if ready else b""
            assert part, "Chromium ended or did not answer"
            self._read += part


@contextmanager
def running_browser(program: str, profile: Path) -> Iterator[Browser]:
    """Yield a browser with an empty profile; it ends with the block."""
    (read_commands, commands), (answers, write_answers) = os.pipe(), os.pipe()
    # The browser reads commands from descriptor 3 and answers on 4.
    script = f'exec "$@" 3<&{read_commands} 4>&{write_answers}'
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", program, *FLAGS, f"--user-data-dir={profile}"],
        pass_fds=(read_commands, write_answers), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(read_commands)
    os.close(write_answers)
    try:
        yield Browser(commands, answers)
    finally:
        process.terminate()
        process.wait(TIMEOUT_S)
        os.close(commands)
        os.close(answers)
