"""Draws what `rlctl plan --table` prints: seconds and GPU-hours of a step against GPUs, as docs/plan_table.svg.

python benchmarks/plan_picture.py [--output docs/plan_table.svg]
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ASKED = ("--model", "meta-llama/Llama-3.1-8B", "--preset", "1node", "--gpu", "h100")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 300.0, 190.0, 44.0, 30.0, 22.0
SECONDS, HOURS = "#0072b2", "#d55e00"
STYLE = "text{font:9px system-ui,sans-serif;fill:#5b6570}.m{text-anchor:middle}.e{text-anchor:end}.g{stroke:#dfe3e8}"


def nice(most: float) -> float:
    """Return the step of an axis from 0 to `most` with about four marks."""
    power = 10 ** math.floor(math.log10(most / 4))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if 4 * power * factor >= most)


def panel(rows: Sequence[dict[str, Any]], title: str, color: str, ends: Callable[[dict[str, Any]], list[float]]) -> str:
    """Return one curve over GPU counts with a bar for the range; `ends`: low, predicted and high of a row."""
    step = nice(max(ends(row)[2] for row in rows))
    top = step * math.ceil(max(ends(row)[2] for row in rows) / step)

    def x(place: int) -> float:
        return LEFT + 14 + place * (WIDTH - LEFT - 28) / max(1, len(rows) - 1)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / top * (HEIGHT - BOTTOM - TOP)

    parts = [f'<text x="{LEFT}" y="12" style="fill:{color}">{title}</text>']
    for mark in range(round(top / step) + 1):
        at = y(mark * step)
        parts.append(f'<line class="g" x1="{LEFT}" x2="{WIDTH - 6}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="e" x="{LEFT - 5}" y="{at + 3:.1f}">{mark * step:g}</text>')
    for place, row in enumerate(rows):
        low, middle, high = ends(row)
        at = f"{x(place):.1f}"
        parts.append(f'<text class="m" x="{at}" y="{HEIGHT - BOTTOM + 13}">{row["gpus"]}</text>')
        parts.append(
            f'<line x1="{at}" x2="{at}" y1="{y(low):.1f}" y2="{y(high):.1f}" stroke="{color}" stroke-width="5" '
            'stroke-opacity=".25"/>'
        )
        parts.append(f'<circle cx="{at}" cy="{y(middle):.1f}" r="2.4" fill="{color}"/>')
    line = " ".join(f"{x(place):.1f},{y(ends(row)[1]):.1f}" for place, row in enumerate(rows))
    parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.4"/>')
    parts.append(f'<text class="m" x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 4}">GPUs</text>')
    return "".join(parts)


def picture(rows: Sequence[dict[str, Any]]) -> str:
    """Return both curves next to each other as an SVG file that stands alone."""
    able = [row for row in rows if row["fits"]]

    def seconds(row: dict[str, Any]) -> list[float]:
        return [row["seconds_range"][0], row["seconds"], row["seconds_range"][1]]

    def hours(row: dict[str, Any]) -> list[float]:
        return [value * row["gpus"] / 3600 for value in seconds(row)]

    panels = (panel(able, "seconds a step", SECONDS, seconds), panel(able, "GPU-hours a step", HOURS, hours))
    placed = "".join(f'<g transform="translate({WIDTH * i:.0f} 0)">{one}</g>' for i, one in enumerate(panels))
    title = "Predicted seconds and GPU-hours of a step against GPUs; bars: the range of nine of ten published steps"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH:.0f} {HEIGHT:.0f}" role="img">'
        f"<title>{title}</title><style>{STYLE}</style>"
        f'<rect width="100%" height="100%" fill="#fff"/>{placed}</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "docs" / "plan_table.svg")
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "rlctl", "plan", *ASKED, "--table", "--json"]
    rows = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout)["rows"]
    arguments.output.write_text(picture(rows), encoding="utf-8")
    print(f"{' '.join(['rlctl', *command[3:]])}: {len(rows)} machines -> {arguments.output}")


if __name__ == "__main__":
    main()
