"""The server that tests and previews start: found, started, asked, clear about what is wrong."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge, start_http_server

from tests.support.wait import until
from tools.packaging.prometheus_package import ProgramMissing, fetch, programs
from tools.prometheus import Job, Prometheus, PrometheusFailed, QueryFailed

pytestmark = pytest.mark.processes


def test_what_was_fetched_goes_before_what_is_installed(tmp_path: Path) -> None:
    folder = tmp_path / "usr" / "bin"
    folder.mkdir(parents=True)
    for name in ("prometheus", "promtool"):
        (folder / name).touch()
    found = programs(tmp_path)
    assert (found.prometheus, found.promtool) == (folder / "prometheus", folder / "promtool")


def test_without_the_programs_it_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProgramMissing, match=r"prometheus is neither .*run `python -m tools\."):
        programs(tmp_path)
    with pytest.raises(ProgramMissing, match=r"no packages of Debian: install Prometheus 2\.42"):
        fetch(tmp_path / "folder")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Exports `depth_metres` of two pools."""
    registry = CollectorRegistry()
    depth = Gauge("depth_metres", "x", ["pool"], registry=registry)
    depth.labels("north").set(2)
    depth.labels("south").set(3)
    server, thread = start_http_server(0, "127.0.0.1", registry=registry)
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def prometheus(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("prometheus")
    rules = folder / "own.rules.yml"
    rules.write_text(
        "groups: [{name: pools, rules: [{alert: Deep, expr: 'depth_metres > 2'}, "
        "{record: pools:depth_metres:sum, expr: sum(depth_metres)}]}]"
    )
    drop = {"source_labels": ["pool"], "regex": "south", "action": "drop"}
    jobs = [
        Job("pools", [address], {"town": "x"}),
        Job("pools", [address], {"town": "y"}, [drop]),
        Job("nobody", ["127.0.0.1:1"]),
    ]
    with Prometheus(folder / "own", jobs, interval_s=0.5, rule_files=[rules]) as server:
        until(lambda: server.query('depth_metres{town="x"} and on (pool) depth_metres{town="y"}'))
        yield server


def test_it_answers_queries(prometheus: Prometheus, address: str) -> None:
    found = prometheus.query('depth_metres{town="x"}')
    north, south = sorted(found, key=lambda series: series.value)
    assert (north.value, south.value) == (2, 3)
    assert north.labels == {
        "__name__": "depth_metres",
        "instance": address,
        "job": "pools",
        "pool": "north",
        "town": "x",
    }
    [scalar] = prometheus.query("1 + 1")
    assert (scalar.labels, scalar.value) == ({}, 2)
    assert prometheus.query("nothing_of_this_name") == []
    assert prometheus.label_values("pool", "depth_metres") == ["north", "south"]
    now = time.time()
    assert prometheus.query("depth_metres", at_s=now - 3600) == []
    asked = 'depth_metres{pool="north",town="x"}'
    [series] = prometheus.query_range(asked, now - 60, now + 1, 0.1)
    assert len(series.points) > 1
    assert {value for _, value in series.points} == {2}
    with pytest.raises(QueryFailed, match="parse error"):
        prometheus.query("sum(")


def test_jobs_of_one_name_have_their_own_labels_and_relabelling(prometheus: Prometheus) -> None:
    found = {(each.labels["job"], each.labels["pool"]) for each in prometheus.query("depth_metres")}
    assert found == {("pools", "north"), ("pools", "south")}
    assert prometheus.label_values("pool", 'depth_metres{town="y"}') == ["north"]


def test_it_evaluates_rules(prometheus: Prometheus) -> None:
    until(lambda: prometheus.query("pools:depth_metres:sum"))
    until(lambda: prometheus.query("ALERTS"))
    assert {rule["name"] for rule in prometheus.rules()} == {"Deep", "pools:depth_metres:sum"}
    [alert] = prometheus.alerts()
    assert (alert["labels"]["pool"], alert["state"]) == ("south", "firing")


def test_what_cannot_be_scraped_is_named(prometheus: Prometheus) -> None:
    until(lambda: prometheus.query('up{job="nobody"} == 0'))
    with pytest.raises(PrometheusFailed, match=r"127\.0\.0\.1:1/metrics.*connection refused"):
        prometheus.wait_up(timeout_s=0.1)


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    rules = tmp_path / "wrong.rules.yml"
    rules.write_text("groups: [{name: x, rules: [{record: y, expr: 'sum('}]}]")
    with (
        pytest.raises(PrometheusFailed, match=r"(?s)ended with exit code 1.*parse error"),
        Prometheus(tmp_path / "own", [], rule_files=[rules]),
    ):
        pass
