"""Writes deploy/grafana/dashboards.

python -m tools.dashboards
"""

from __future__ import annotations

from pathlib import Path

from tools.dashboards.boards import adapters, fleet, store

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana" / "dashboards"


def render() -> dict[str, str]:
    """Returns each dashboard's text by file name."""
    boards = {"fleet": fleet, "adapters": adapters, "store": store}
    return {f"{name}.json": board.build().to_json() for name, board in boards.items()}


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in render().items():
        (FOLDER / name).write_text(text)
        print(f"written to {FOLDER / name}")


if __name__ == "__main__":
    main()
