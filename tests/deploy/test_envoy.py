"""The Envoy configuration that we ship: Envoy takes it, and it says what our own code says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from inference_svc.api.load_report import REFUSED_HEADER
from loadout._routing.metadata import ADAPTER_HEADER
from loadout.inference.v1 import inference_pb2
from tests.support.access.certificates import Authority
from tests.support.deploy.envoy import (
    CERTIFICATES,
    CONFIG,
    STATS,
    TLS_CONFIG,
    configuration,
    round_robin,
    validate,
)
from tests.support.deploy.manifests import SCALED_TO_ZERO, overlay

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
RESOURCES: dict[str, Any] = yaml.safe_load(CONFIG.read_text())["static_resources"]
CLUSTERS = {cluster["name"]: cluster for cluster in RESOURCES["clusters"]}


def manager() -> dict[str, Any]:
    [listener] = RESOURCES["listeners"]
    [chain] = listener["filter_chains"]
    [found] = chain["filters"]
    config: dict[str, Any] = found["typed_config"]
    return config


def routes() -> Iterator[dict[str, Any]]:
    [host] = manager()["route_config"]["virtual_hosts"]
    yield from host["routes"]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Envoy reads them when it validates."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = Authority(folder)
    chain, key = authority.issue("envoy")
    for name, path in (("tls.crt", chain), ("tls.key", key), ("ca.crt", authority.path)):
        path.rename(folder / name)
    return folder


@pytest.mark.processes
def test_envoy_takes_it() -> None:
    done = validate(CONFIG)
    assert done.returncode == 0, done.stderr
    assert "OK" in done.stdout + done.stderr


@pytest.mark.processes
def test_envoy_takes_the_one_with_tls(certificates: Path, tmp_path: Path) -> None:
    path = tmp_path / "envoy.yaml"
    path.write_text(TLS_CONFIG.read_text().replace(CERTIFICATES, str(certificates)))
    done = validate(path)
    assert done.returncode == 0, done.stderr


def test_with_tls_it_is_the_same_but_for_that() -> None:
    found = yaml.safe_load(TLS_CONFIG.read_text())
    [listener] = found["static_resources"]["listeners"]
    parts = [*listener["filter_chains"], *found["static_resources"]["clusters"]]
    for part in parts:
        assert part.pop("transport_socket")["name"] == "envoy.transport_sockets.tls"
    assert found == yaml.safe_load(CONFIG.read_text())


@pytest.mark.processes
def test_its_metrics_can_be_scraped_and_nothing_else_of_its_administration() -> None:
    done = validate(CONFIG, "--config-yaml", STATS.read_text())
    assert done.returncode == 0, done.stderr
    added = yaml.safe_load(STATS.read_text())["static_resources"]
    [cluster], [listener] = added["clusters"], added["listeners"]
    [endpoints] = cluster["load_assignment"]["endpoints"]
    [endpoint] = endpoints["lb_endpoints"]
    administration = yaml.safe_load(CONFIG.read_text())["admin"]["address"]
    assert endpoint["endpoint"]["address"] == administration
    [chain] = listener["filter_chains"]
    [found] = chain["filters"]
    [host] = found["typed_config"]["route_config"]["virtual_hosts"]
    [route] = host["routes"]
    assert route == {
        "match": {"path": "/stats/prometheus"},
        "route": {"cluster": cluster["name"]},
    }
    assert found["typed_config"]["stat_prefix"] != manager()["stat_prefix"], "no request of callers"


@pytest.mark.processes
def test_requests_are_counted_under_the_name_that_keda_asks_for() -> None:
    [scaled] = overlay(SCALED_TO_ZERO).of_kind("ScaledObject")
    [arriving] = [each for each in scaled["spec"]["triggers"] if each["name"] == "arriving"]
    prefix = f'envoy_http_conn_manager_prefix="{manager()["stat_prefix"]}"'
    assert prefix in arriving["metadata"]["query"]


@pytest.mark.processes
@pytest.mark.parametrize("change", [None, round_robin])
def test_envoy_takes_what_the_tests_make_of_it(change: Any, tmp_path: Path) -> None:
    path = tmp_path / "envoy.yaml"
    path.write_text(yaml.safe_dump(configuration(["127.0.0.1:7080"], change)))
    done = validate(path)
    assert done.returncode == 0, done.stderr


@pytest.mark.processes
def test_envoy_refuses_a_mistake(tmp_path: Path) -> None:
    path = tmp_path / "envoy.yaml"
    path.write_text(CONFIG.read_text().replace("lb_policy: MAGLEV", "lb_policy: MAGLEFF"))
    assert validate(path).returncode != 0


def test_calls_with_an_adapter_are_hashed_by_it_and_others_are_not() -> None:
    for route in routes():
        headers = [header["name"] for header in route["match"].get("headers", ())]
        target = route["route"]
        if headers:
            assert headers == [ADAPTER_HEADER]
            assert target["hash_policy"] == [{"header": {"header_name": ADAPTER_HEADER}}]
            assert CLUSTERS[target["cluster"]]["lb_policy"] == "MAGLEV"
        else:
            assert CLUSTERS[target["cluster"]]["lb_policy"] == "LEAST_REQUEST"


def test_no_stream_times_out() -> None:
    assert manager()["stream_idle_timeout"] == "0s"
    assert all(route["route"]["timeout"] == "0s" for route in routes())


def test_retries_avoid_the_host_that_failed() -> None:
    for route in routes():
        policy = route["route"]["retry_policy"]
        [predicate] = policy["retry_host_predicate"]
        assert predicate["name"] == "envoy.retry_host_predicates.previous_hosts"
        assert policy["host_selection_retry_max_attempts"] > policy["num_retries"]


def test_only_refusals_that_say_so_are_sent_on() -> None:
    """UNAVAILABLE is also what comes after a long wait for an adapter."""
    *_, policy = (route["route"]["retry_policy"] for route in routes())
    assert policy["retriable_headers"] == [{"name": REFUSED_HEADER, "present_match": True}]
    wanted = set(policy["retry_on"].split(","))
    assert wanted == {"connect-failure", "refused-stream", "reset", "retriable-headers"}


def test_what_may_not_be_repeated_is_sent_again_only_if_it_never_arrived() -> None:
    [path] = [route["match"]["path"] for route in routes() if "path" in route["match"]]
    assert path == f"/{SERVICE.full_name}/{SERVICE.methods_by_name['UnloadAdapter'].name}"
    first = next(routes())
    assert first["match"]["path"] == path, "it comes before what matches everything"
    assert set(first["route"]["retry_policy"]["retry_on"].split(",")) == {
        "connect-failure",
        "refused-stream",
        "reset-before-request",
    }


def test_health_is_that_of_our_service() -> None:
    for cluster in CLUSTERS.values():
        [check] = cluster["health_checks"]
        assert check["grpc_health_check"] == {"service_name": SERVICE.full_name}


def test_an_answer_of_the_service_ejects_nobody() -> None:
    for cluster in CLUSTERS.values():
        outliers = cluster["outlier_detection"]
        assert outliers["split_external_local_origin_errors"]
        assert outliers["enforcing_consecutive_5xx"] == 0
        assert outliers["enforcing_consecutive_gateway_failure"] == 0
