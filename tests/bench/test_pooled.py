"""The comparison of embeddings runs, with ours alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.pooled import texts

pytestmark = [pytest.mark.long, pytest.mark.processes]


def test_ours_is_measured_with_one_adapter_and_with_many(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    texts.main(["--rounds", "1", "--peers", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    found = [(row["tokens"], row["adapters"], row["system"]) for row in rows]
    assert found == [(64, 1, "ours"), (512, 1, "ours"), (64, 16, "ours"), (512, 16, "ours")]
    for row in rows:
        assert row["texts/s"] > 0
        assert row["texts/processor s"] > 0
        assert row["ours, times"] == row["ours, times by processor"] == 1
