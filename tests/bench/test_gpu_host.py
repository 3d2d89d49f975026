"""The host's time of a decode step beside its bar: the exit status tells."""

from __future__ import annotations

import sys

import pytest

from bench.gpu_model import host as gpu_host


@pytest.mark.parametrize(("bar", "status"), [(0.0, 1), (1e9, 0)])
def test_check_ends_with_a_status(monkeypatch, bar, status):
    monkeypatch.setattr(gpu_host, "MOST_REFERENCES", {(2, 1): bar})
    monkeypatch.setattr(gpu_host, "CHECK_ROUNDS", 1)
    monkeypatch.setattr(gpu_host, "CHECK_STEPS", 2)
    monkeypatch.setattr(sys, "argv", ["gpu_host", "--check"])
    with pytest.raises(SystemExit) as ended:
        gpu_host.main()
    assert ended.value.code == status
