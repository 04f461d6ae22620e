"""Draws curves of steps as an SVG file that stands alone.

python benchmarks/pictures.py RUN docs/curve.svg --curve reward_mean --curve environment/unreadable
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from rlctl.report.charts import HEIGHT, WIDTH, Series, line_chart
from rlctl.telemetry.headline import columns
from rlctl.telemetry.metrics import read_metrics

COLORS = ("#0072b2", "#d55e00", "#009e73", "#b5577f", "#b8860b")
STYLE = (
    "path{fill:none;stroke:var(--c);stroke-width:1.4}.faint{opacity:.3}.dot{fill:var(--c)}.grid{stroke:#dfe3e8}"
    "text{font:8px system-ui,sans-serif;fill:#5b6570}.y{text-anchor:end}.x{text-anchor:middle}"
)


def picture(charts: Sequence[tuple[str, Sequence[Series]]], steps: int, label: str) -> str:
    """Return charts next to each other, each of a unit and its curves, with a legend of the curves of the first."""
    colors = "".join(f".c{place}{{--c:{color}}}" for place, color in enumerate(COLORS))
    legend = "".join(
        f'<text x="{60 + 60 * place}" y="10" style="fill:{COLORS[one.color]}">{one.name}</text>'
        for place, one in enumerate(charts[0][1])
    )
    parts = []
    for place, (unit, curves) in enumerate(charts):
        body = line_chart(curves, label, (1.0, float(steps)), unit).split(">", 1)[1].removesuffix("</svg>")
        quoted = re.sub(r"=([\w.-]+)(?=[\s/>])", r'="\1"', body)
        parts.append(f'<g transform="translate({place * WIDTH:.0f} 12)">{quoted}</g>')
    box = f"0 0 {len(charts) * WIDTH:.0f} {HEIGHT + 12:.0f}"
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img"><title>{label}</title>'
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    return f"{opening}{ground}<style>{colors}{STYLE}</style>{legend}{''.join(parts)}</svg>\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--curve", action="append", required=True, metavar="NAME", help="a metric of metrics.jsonl")
    given = parser.parse_args()
    lines = read_metrics(given.run / "metrics.jsonl")
    found = columns(lines)
    words = [name.replace("_", " ").replace("/", ": ") for name in given.curve]
    charts = [
        (word, [Series(word, found[name], color)])
        for color, (word, name) in enumerate(zip(words, given.curve, strict=True))
    ]
    label = ", ".join(words)
    given.output.write_text(picture(charts, len(lines), label))


if __name__ == "__main__":
    main()
