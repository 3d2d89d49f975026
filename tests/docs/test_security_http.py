"""docs/limits.md has a row for every HTTP route."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from starlette.routing import Route

from inference_svc.api.http.app import make_app

ROOT = Path(__file__).parents[2]
HEADING = "## HTTP routes"


def rows() -> list[list[str]]:
    section = (ROOT / "docs/limits.md").read_text().partition(HEADING)[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_every_route_has_a_line() -> None:
    nothing: Any = SimpleNamespace()
    app: Any = make_app(
        *(nothing, SimpleNamespace(gateway_exposition=None), lambda end: None),
        *(lambda: "", nothing),
        is_serving=lambda: True,
    )
    served = {route.path for route in app._app.routes if isinstance(route, Route)}
    named = {path for row in rows() for path in re.findall(r"`(?:GET|POST) (\S+)`", row[0])}
    assert named == served
