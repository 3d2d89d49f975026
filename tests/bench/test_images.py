"""The comparison of images runs, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.images import compare

pytestmark = [pytest.mark.long, pytest.mark.processes]


@pytest.mark.parametrize("tiles", [1, 2])
def test_images_are_measured_beside_peft(tiles: int, tmp_path: Path) -> None:
    """Both have the same tokens, or it raises."""
    out = tmp_path / "found.json"
    compare.main(["--shape", "tiny", "--tiles", str(tiles), "--rounds", "2", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 3
    for row in rows:
        assert row["ours"] > 0
        assert row["beside"] > 0
        assert all(len(each) == 2 for each in row["all"].values())
