"""Draws the answers to the dashboards' queries under a mixed load: docs/images/dashboard-*.png.

    python -m tools.dashboards.preview [--seconds N]

It starts both services, the load and a real Prometheus. The pictures are plots of Prometheus'
answers in the dashboards' layout; Grafana is not used.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tools.dashboards.__main__ import render
from tools.dashboards.preview.drawing import Answers, draw
from tools.dashboards.preview.reading import Json, everything, expand, panels
from tools.mixed_load.load import MixedLoad
from tools.prometheus import Prometheus, Series

ROOT = Path(__file__).parents[3]
IMAGES = ROOT / "docs" / "images"
RULES = sorted((ROOT / "deploy" / "prometheus").glob("*.rules.yml"))
SECONDS = 120.0
SCRAPE_S, STEP_S, WINDOW_S = 2.0, 2.0, 15.0


@dataclass(frozen=True, slots=True)
class Span:
    """The period to draw, in unix times."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


def ask(board: Json, prometheus: Prometheus, span: Span) -> Answers:
    """Returns each panel's answers by its id, over the span, or for a table at its end. Times are
    seconds since the start."""
    values = everything(board, prometheus, window_s=WINDOW_S, range_s=span.length_s)

    def answer(target: Json) -> list[Series]:
        promql = expand(target["expr"], values)
        if target["instant"]:
            return prometheus.query(promql, span.end_s)
        return prometheus.query_range(promql, span.start_s, span.end_s, STEP_S)

    return {
        panel["id"]: [
            [_since(span.start_s, series) for series in answer(target)]
            for target in panel["targets"]
        ]
        for panel in panels(board)
    }


def _since(start_s: float, series: Series) -> Series:
    return Series(series.labels, tuple((when - start_s, value) for when, value in series.points))


def preview(seconds: float, images: Path) -> None:
    """Runs the load for `seconds` and draws all dashboards. Raises as MixedLoad and Prometheus."""
    with tempfile.TemporaryDirectory() as name, MixedLoad(Path(name) / "load") as load:
        folder = Path(name) / "prometheus"
        with Prometheus(folder, load.jobs, interval_s=SCRAPE_S, rule_files=RULES) as prometheus:
            load.wait_toured()
            start_s = time.time()
            load.run(seconds)
            span = Span(start_s, time.time())
            for file, text in render().items():
                board = json.loads(text)
                path = images / f"dashboard-{Path(file).stem}.png"
                draw(board, ask(board, prometheus, span), path)
                print(f"written to {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="duration of the load (%(default)s)"
    )
    IMAGES.mkdir(parents=True, exist_ok=True)
    preview(parser.parse_args().seconds, IMAGES)


if __name__ == "__main__":
    main()
