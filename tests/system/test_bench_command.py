"""`loadout bench` against real services: what it measures, and when a baseline fails it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadout.benchmark.measure import METRICS
from loadout.cli.__main__ import main
from tests.support.access.policies import token_of
from tests.system.observed import Observed
from tests.system.services import Services

QUICK = ["--requests", "6", "--in-flight", "2", "--rounds", "2", "--max-tokens", "6"]
QUICK += ["--prompt-chars", "20", "--loads", "1"]


@pytest.fixture
def bench(services: Services, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command, with two adapters."""
    monkeypatch.setenv("LOADOUT_INFERENCE", services.inference_address)
    monkeypatch.setenv("LOADOUT_STORE", services.store_address)
    for name in ("r16", "r64"):
        services.client.register(f"bench-{name}", services.source(name))
    adapters = ["--adapter", "bench-r16", "--adapter", "bench-r64"]
    return lambda *more: main(["bench", *QUICK, *adapters, *more])


def scaled(path: Path, factor: float) -> Path:
    """A baseline that was faster by this factor, or slower."""
    document = json.loads(path.read_text())
    for figures in document["rounds"]:
        for name in figures:
            figures[name] *= factor if METRICS[name].is_more_better else 1 / factor
    changed = path.with_name(f"scaled-{factor:g}.json")
    changed.write_text(json.dumps(document))
    return changed


def test_figures_and_baselines(bench: Callable[..., int], tmp_path: Path, capfd: Any) -> None:
    out = tmp_path / "base.json"
    assert bench("--out", str(out)) == 0
    document = json.loads(out.read_text())
    assert set(document["medians"]) == set(METRICS)
    assert len(document["rounds"]) == 2
    assert [each["rank"] for each in document["conditions"]["adapters"]] == [16, 64]
    assert document["conditions"]["server"]["machine"].endswith("processors")
    table = capfd.readouterr().out
    assert all(name in table for name in METRICS)

    assert bench("--baseline", str(scaled(out, 0.001))) == 0
    assert "worse" not in capfd.readouterr().out

    assert bench("--json", "--baseline", str(scaled(out, 1000))) == 1
    said = capfd.readouterr()
    assert json.loads(said.out)["format"] == 1
    assert "6 of 6 metrics are worse than the baseline" in said.err

    assert bench("--baseline", str(scaled(out, 1000)), "--max-tokens", "7") == 1
    refused = capfd.readouterr()
    assert refused.out == ""
    assert "under other conditions: workload.num_tokens was 6, is 7 (--force" in refused.err
    slower = str(scaled(out, 0.001))
    assert bench("--baseline", slower, "--max-tokens", "7", "--force") == 0
    assert "num_tokens was 6, is 7" in capfd.readouterr().err


def test_what_is_pinned_is_not_loaded_again(
    bench: Callable[..., int], services: Services, capfd: Any
) -> None:
    services.client.load("bench-r16", pin=True)
    try:
        assert bench("--rounds", "1", "--json") == 0
        said = capfd.readouterr()
        assert "adapter_load_p50_seconds" in json.loads(said.out)["medians"]
        assert said.err == "not reloaded, because pinned: bench-r16\n"
        services.client.load("bench-r64", pin=True)
        assert bench() == 1
        assert "all these adapters are pinned, so the server" in capfd.readouterr().err
    finally:
        for name in ("bench-r16", "bench-r64"):
            services.client.unpin_resident(name)


def test_who_may_not_unload_hears_so_at_once(
    observed: Observed, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    observed.register("benched", "r16")
    monkeypatch.setenv("LOADOUT_TOKEN", token_of("caller"))
    places = ("--inference", observed.inference_address, "--store", observed.store_address)
    assert main(["bench", *QUICK, *places, "--adapter", "default/benched"]) == 1
    said = capfd.readouterr().err
    assert said.startswith("loadout: --loads: ")
    assert said.endswith("; --loads 0 leaves loads out (PERMISSION_DENIED)\n")


def test_what_is_no_baseline(bench: Callable[..., int], tmp_path: Path, capfd: Any) -> None:
    path = tmp_path / "broken.json"
    path.write_text("{}")
    assert bench("--baseline", str(path)) == 1
    assert f"--baseline: {path} is not a measurement" in capfd.readouterr().err
    assert bench("--baseline", str(tmp_path / "nowhere")) == 1
    assert "No such file" in capfd.readouterr().err
    assert bench("--tolerance", "nonsense=3%") == 1
    assert "there is no metric 'nonsense'" in capfd.readouterr().err
