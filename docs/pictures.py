"""Draws the pictures of the documentation from a real run: the terminal as SVG, and the report as PNG.

    python docs/pictures.py [--run DIR] [--steps 20] [--output docs]

Without --run it trains the laptop preset in a new terminal, keeps the terminal's output, and writes
terminal.svg. The report of the run, or of the one that is named, becomes report_wide.png (light) and report_phone.png
(dark). Needs selenium, Chromium and its driver.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

WIDTH, HEIGHT = 110, 40
SHAPES = (("report_wide.png", 1200, 1500, "light"), ("report_phone.png", 390, 1500, "dark"))
"""File, width and height in pixels, and colors of each picture of the report."""
TRAIN = ("train", "grpo", "--preset", "laptop")
VALIDATION = ("validation.every=5", "validation.at_start=true", "validation.holdout=16")


def trained(place: Path, run: str, steps: int) -> str:
    """Train the laptop preset in a terminal, with `place` as working directory; return everything that the terminal
    got."""
    sets = [part for value in VALIDATION for part in ("--set", value)]
    command = ["rlctl", *TRAIN, "--steps", str(steps), "--run-dir", run, *sets]
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(WIDTH)}
    executable = str(Path(sys.executable).with_name("rlctl"))
    process = subprocess.Popen(
        [executable, *command[1:]], cwd=place, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    got = b""
    try:
        while part := os.read(ours, 1 << 16):
            got += part
    except OSError:  # the terminal is closed: the run has ended
        pass
    if process.wait():
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{got.decode(errors='replace')}")
    return got.decode(errors="replace").replace(f"{place}/", "").replace(str(Path.home()), "~")


def lines_of(shown: str) -> list[str]:
    """Return the lines that stay in a terminal: one that was drawn again is as it was drawn last."""
    lines, row = [""], 0
    for part in re.split(r"(\n|\r|\x1b\[1A|\x1b\[2K|\x1b\[\?25[lh])", shown.replace("\r\n", "\n")):
        if part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\x1b[1A":
            row = max(0, row - 1)
        elif part == "\x1b[2K":
            lines[row] = ""
        elif not part.startswith(("\r", "\x1b[?")):
            lines[row] += part
    return [line.rstrip() for line in lines if line.strip()]


def draw_terminal(shown: str, steps: int, path: Path) -> None:
    """Write the terminal as SVG, in any font of fixed width: rich would have a browser fetch one."""
    console = Console(record=True, width=WIDTH, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    command = f"rlctl {' '.join(TRAIN)} --steps {steps}"
    sets = " ".join(f"--set {value}" for value in VALIDATION)
    for line in [f"$ {command} \\", f"    {sets}", *lines_of(shown)]:
        console.print(Text.from_ansi(line))
    svg = console.export_svg(title=command)
    path.write_text(re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.DOTALL).replace("Fira Code, ", ""))


def draw_report(report: Path, output: Path) -> None:
    """Write a picture of the beginning of the report at each of the shapes."""
    from selenium import webdriver  # pyright: ignore[reportMissingImports]

    options: Any = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for flag in (
        "headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
        "disable-component-update", "disable-sync", "hide-scrollbars",
    ):  # fmt: skip
        options.add_argument(f"--{flag}")
    browser: Any = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        for name, width, height, scheme in SHAPES:
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            browser.get(report.absolute().as_uri())
            browser.save_screenshot(str(output / name))
    finally:
        browser.quit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="draw the report of this run, and no terminal")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        if given.run is None:
            shown = trained(Path(temporary), "runs/my-run", given.steps)
            draw_terminal(shown, given.steps, given.output / "terminal.svg")
        draw_report((given.run or Path(temporary) / "runs/my-run") / "report.html", given.output)


if __name__ == "__main__":
    main()
