"""Replicas as metrics: the current ones, by address up to a limit."""

from prometheus_client import CollectorRegistry, generate_latest

from inference_svc.metrics.store import MAX_LABELS, replica_metrics
from inference_svc.store.replicas import Endpoint, Replicas
from servicekit.telemetry.metrics import ScrapeCollector


def scrape(replicas: Replicas) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(ScrapeCollector(lambda: replica_metrics(replicas)))
    lines = generate_latest(registry).decode().splitlines()
    samples = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    return {
        name.removeprefix("loadout_inference_store_"): float(value) for name, _, value in samples
    }


def test_health_and_pulls_by_replica() -> None:
    replicas = Replicas.at("a:1", "b:1")
    replicas.report_failure("b:1")
    replicas.count_pull("a:1", "done", 100)
    replicas.count_pull("a:1", "done", 50)
    replicas.count_pull("b:1", "failed", 7)
    replicas.count_failover()
    assert scrape(replicas) == {
        'replicas_healthy{replica="a:1"}': 1,
        'replicas_healthy{replica="b:1"}': 0,
        'pulls_total{replica="a:1",result="done"}': 2,
        'pulls_total{replica="b:1",result="failed"}': 1,
        'pulled_bytes_total{replica="a:1"}': 150,
        'pulled_bytes_total{replica="b:1"}': 7,
        "failovers_total": 1,
    }


def test_former_addresses_are_not_exported() -> None:
    replicas = Replicas.at("first:1")
    for number in range(500):
        replicas.replace([Endpoint(f"10.0.{number}.1:1"), Endpoint(f"10.0.{number}.2:1")])
        replicas.count_pull(f"10.0.{number}.1:1", "done", 1)
    found = scrape(replicas)
    assert len(found) == 6
    assert found['replicas_healthy{replica="10.0.499.2:1"}'] == 1


def test_many_replicas_share_the_last_label() -> None:
    replicas = Replicas.at(*(f"r{number}:1" for number in range(MAX_LABELS + 8)))
    for status in replicas.statuses():
        replicas.count_pull(status.address, "done", 10)
    found = scrape(replicas)
    assert len(found) == 3 * (MAX_LABELS + 1) + 1
    assert found['replicas_healthy{replica="others"}'] == 8
    assert found['pulled_bytes_total{replica="others"}'] == 80
