"""The example for inference gateways: its parts fit together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "deploy" / "gateway"


def objects() -> Iterator[dict[str, Any]]:
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    for name in kustomization["resources"]:
        yield from yaml.safe_load_all((FOLDER / name).read_text())


def one(kind: str, name: str = "") -> dict[str, Any]:
    [found] = [
        each
        for each in objects()
        if each["kind"] == kind and (not name or each["metadata"]["name"] == name)
    ]
    return found


def container(deployment: dict[str, Any]) -> dict[str, Any]:
    [found] = deployment["spec"]["template"]["spec"]["containers"]
    return dict(found)


@pytest.fixture
def front() -> dict[str, Any]:
    return container(yaml.safe_load((FOLDER / "http-front.yaml").read_text()))


def test_the_pool_is_what_the_route_leads_to() -> None:
    pool = one("InferencePool")
    [rule] = one("HTTPRoute")["spec"]["rules"]
    [backend] = rule["backendRefs"]
    assert backend["kind"] == pool["kind"]
    assert backend["name"] == pool["metadata"]["name"]
    assert backend["group"] == pool["apiVersion"].partition("/")[0]
    assert one("HTTPRoute")["spec"]["parentRefs"] == [{"name": one("Gateway")["metadata"]["name"]}]
    assert set(rule["timeouts"].values()) == {"0s"}, "no timeouts on token streams"


def test_the_front_listens_where_the_pool_and_the_network_policy_say(front) -> None:
    [port] = one("InferencePool")["spec"]["targetPorts"]
    assert front["ports"] == [{"name": "http", "containerPort": port["number"]}]
    [setting] = front["env"]
    assert setting["value"] == f"0.0.0.0:{port['number']}"
    [rule] = one("NetworkPolicy", "inference-http")["spec"]["ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": "http"}]
    [to_replicas, _] = one("NetworkPolicy", "loadout-picker")["spec"]["egress"]
    assert to_replicas["ports"] == [{"protocol": "TCP", "port": port["number"]}]


def test_the_picker_is_found_and_knows_its_pool() -> None:
    pool, service = one("InferencePool"), one("Service")
    deployment = one("Deployment")
    reference = pool["spec"]["endpointPickerRef"]
    [port] = service["spec"]["ports"]
    assert (reference["name"], reference["port"]["number"]) == (
        service["metadata"]["name"],
        port["port"],
    )
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    ports = {each["name"]: each["containerPort"] for each in container(deployment)["ports"]}
    arguments = dict(each.split("=") for each in container(deployment)["args"])
    assert arguments["--pool-name"] == pool["metadata"]["name"]
    assert int(arguments["--grpc-port"]) == ports[port["targetPort"]]
    assert int(arguments["--grpc-health-port"]) == ports["health"]


def test_the_picker_s_plugins_exist() -> None:
    data = one("ConfigMap")["data"]
    [(file, text)] = data.items()
    config = yaml.safe_load(text)
    [profile] = config["schedulingProfiles"]
    declared = {plugin["type"] for plugin in config["plugins"]}
    assert {plugin["pluginRef"] for plugin in profile["plugins"]} <= declared
    [argument] = [a for a in container(one("Deployment"))["args"] if a.startswith("--config-file=")]
    assert argument.endswith(f"/{file}")
