"""`rlctl watch`: the page of a run that trains, over HTTP and in a browser where one is installed."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlctl.cli import run as rlctl
from rlctl.errors import InputError
from rlctl.report.watch import PageServer
from rlctl.runs.directory import RunDirectory
from support.run_directories import made_run, step_line


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return made_run(tmp_path / "run")


@pytest.fixture
def server(run: RunDirectory) -> Iterator[PageServer]:
    with PageServer(run.path, "127.0.0.1", 0) as made:
        threading.Thread(target=made.serve_forever, args=(0.05,), daemon=True).start()
        yield made
        made.shutdown()


def get(address: str, **headers: str) -> tuple[int, str, Any]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=20) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


def take_step(run: RunDirectory, step: int) -> None:
    with run.metrics.open("a") as file:
        file.write(json.dumps(step_line(step)) + "\n")


def test_the_page_is_that_of_the_run_and_is_sent_again_when_it_changes(run: RunDirectory, server: PageServer) -> None:
    assert server.address.startswith("http://127.0.0.1:")
    status, text, headers = get(server.address)
    assert status == 200
    assert "stopped, step 5 of 8" in text
    assert "<script>" in text
    assert "http" not in text.replace("Content", "")  # nothing from elsewhere
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    same = {"If-None-Match": headers["ETag"]}
    assert get(server.address, **same)[:2] == (304, "")
    take_step(run, 6)
    status, text, headers = get(server.address, **same)
    assert status == 200
    assert "stopped, step 6 of 8" in text
    assert get(f"{server.address}report.html")[0] == 404
    run.metrics.write_text("[1]\n[2]\n")
    status, text, _ = get(server.address)
    assert status == 503
    assert "metrics.jsonl, line 1 is not the metrics of a step" in text


def test_the_metrics_of_the_last_step_are_there_for_prometheus(run: RunDirectory, server: PageServer) -> None:
    status, text, headers = get(f"{server.address}metrics")
    assert (status, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    sample = re.compile(r"""([a-zA-Z_:][a-zA-Z0-9_:]*)\{run="run"\} (\S+)""")  # the format's grammar of a line
    lines = [line for line in text.splitlines() if not line.startswith("# TYPE ")]
    values = {found[1]: float(found[2]) for line in lines if (found := sample.fullmatch(line))}
    assert len(values) == len(lines)
    last = json.loads(run.metrics.read_text().splitlines()[-1])
    assert values["rlctl_step"] == 5
    assert values["rlctl_running"] == 0
    assert values["rlctl_reward_mean"] == last["reward_mean"]
    assert values["rlctl_seconds_total"] == last["seconds"]["total"]


def test_losses_and_skipped_steps_of_all_steps_are_counters(run: RunDirectory, server: PageServer) -> None:
    with run.metrics.open("a") as file:
        for step, more in (
            (6, {"lost_engines": 2, "skipped_steps": 1}),
            (7, {"policy_restarts": 1, "lost_ranks": 2, "skipped_steps": 3}),
            (8, {"policy_restarts": 1, "lost_ranks": 1}),
        ):
            file.write(json.dumps({**step_line(step), **more}) + "\n")
    run.write_manifest({**run.manifest(), "resumes": 2})
    _, text, _ = get(f"{server.address}metrics")
    for name, value in (("lost_engines", 2.0), ("lost_ranks", 3.0), ("policy_restarts", 2.0), ("skipped_steps", 4.0),
                        ("run_resumes", 2.0)):  # fmt: skip
        assert f'# TYPE rlctl_{name}_total counter\nrlctl_{name}_total{{run="run"}} {value}\n' in text


def test_probes_follow_the_process_and_the_first_step(run: RunDirectory, server: PageServer) -> None:
    """A run of 8 steps with 5 of them, then one that has taken none; both without and with a process."""
    places = [f"{server.address}{name}" for name in ("livez", "readyz")]
    assert [get(place)[:2] for place in places] == [(503, "stopped, step 5\n")] * 2
    run.reopen()
    with contextlib.ExitStack() as stack:
        stack.callback(run.release)
        assert [get(place)[:2] for place in places] == [(200, "running, step 5\n")] * 2
        run.metrics.write_text("")
        assert [get(place)[0] for place in places] == [200, 503]
    for step in range(1, 9):
        take_step(run, step)
    assert [get(place)[:2] for place in places] == [(200, "finished, step 8\n")] * 2


def test_a_run_can_be_watched_before_its_first_step(tmp_path: Path) -> None:
    run = made_run(tmp_path / "new", steps=0)
    run.metrics.unlink()
    with PageServer(run.path, "127.0.0.1", 0) as server:
        assert "no step finished yet" in server.page()[1].decode()
        take_step(run, 1)
        assert "step 1 of 8" in server.page()[1].decode()


def test_an_address_that_is_taken_is_named_or_another_is_found(run: RunDirectory, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=rf"--host 127\.0\.0\.1 --port {port} cannot be listened on: Address"):
            PageServer(run.path, "127.0.0.1", port)
    with PageServer(run.path, "127.0.0.1", None) as first, PageServer(run.path, "127.0.0.1", None) as second:
        assert first.server_address[1] != second.server_address[1]
    assert rlctl(["watch", str(tmp_path / "nothing")]) == 2


@pytest.fixture
def browser() -> Iterator[Any]:
    """A headless Chromium without a network, where one with its driver is installed."""
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("no Chromium with its driver is installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (
        "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
        "disable-component-update", "disable-sync",
    ):  # fmt: skip
        options.add_argument(f"--{flag}")
    made = webdriver.Chrome(options, webdriver.ChromeService(driver))
    yield made
    made.quit()


def until(holds: Callable[[], bool]) -> None:
    for _ in range(600):
        if holds():
            return
        time.sleep(0.1)
    raise AssertionError("it did not come to that within a minute")


def test_a_browser_keeps_what_its_reader_opened_while_the_page_changes(
    run: RunDirectory, server: PageServer, browser: Any
) -> None:
    """By keyboard, at two widths, light and dark."""
    browser.get(server.address)
    until(lambda: "keeps itself up to date" in browser.find_element("id", "live").text)

    def js(expression: str) -> Any:
        return browser.execute_script(f"return {expression}")

    def press(key: str) -> None:
        browser.switch_to.active_element.send_keys(key)

    for _ in range(20):
        press("\ue004")  # Tab
        if js("document.activeElement.textContent") == "Messages of the run":
            break
    press("\ue007")  # Enter
    assert js("document.getElementById('messages-of-the-run').open")
    assert js("getComputedStyle(document.activeElement).outlineStyle") != "none"
    take_step(run, 6)
    until(lambda: "step 6 of 8" in browser.find_element("css selector", ".state[role=status]").text)
    assert js("document.getElementById('messages-of-the-run').open")
    assert js("document.activeElement.textContent") == "Messages of the run"
    for width in (1280, 360):
        seen = set()
        for scheme in ("light", "dark"):
            browser.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride",
                {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False},
            )
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            assert js("document.documentElement.scrollWidth") <= width
            seen.add(js("getComputedStyle(document.body).backgroundColor"))
        assert len(seen) == 2
    loaded = js("performance.getEntriesByType('resource').map(one => one.name)")
    assert {name for name in loaded if not name.startswith(server.address)} == set()
    server.shutdown()
    server.socket.close()
    until(lambda: "does not answer any more" in browser.find_element("id", "live").text)
