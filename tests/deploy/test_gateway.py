"""The example for inference gateways: its parts fit together."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "deploy" / "gateway"
SCHEMAS = {
    schema["title"]: schema
    for schema in (
        json.loads(path.read_text())
        for path in (Path(__file__).parent / "schemas" / "gateway").glob("*.json")
    )
}
"""apiVersion/kind -> schema."""


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


def title_of(thing: dict[str, Any]) -> str:
    return f"{thing['apiVersion']}/{thing['kind']}"


def is_gateways(thing: dict[str, Any]) -> bool:
    """Of an API that clusters get from elsewhere."""
    return "networking.k8s.io" in thing["apiVersion"] and thing["kind"] != "NetworkPolicy"


def test_objects_are_what_the_gateway_apis_and_kubernetes_say() -> None:
    things = list(objects())
    custom = [each for each in things if is_gateways(each)]
    assert {title_of(each) for each in custom} == set(SCHEMAS)
    for each in custom:
        jsonschema.validate(each, SCHEMAS[title_of(each)])
    newest = max(
        kubernetes_validate.utils.all_versions(), key=lambda v: [int(n) for n in v.split(".")]
    )
    minor = kubernetes_validate.utils.major_minor(newest)
    for each in things:
        if not is_gateways(each):
            kubernetes_validate.validate(each, minor, strict=True)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("InferencePool", ("endpointPickerRef", "portNumber"), 9002),  # as before v1
        ("InferencePool", ("endpointPickerRef", "port"), None),  # a Service's is needed
        ("InferencePool", ("endpointPickerRef", "failureMode"), "Open"),
        ("InferencePool", ("selector",), {"app": "inference"}),  # as before v1
        ("InferencePool", ("targetPorts", 0, "number"), 0),
        ("HTTPRoute", ("rules", 0, "timeouts", "request"), "0"),
        ("HTTPRoute", ("rules", 0, "backendRef"), {}),
        ("Gateway", ("listeners", 0, "port"), "http"),
    ],
)
def test_what_the_gateway_apis_do_not_know_is_refused(
    kind: str, path: tuple[str | int, ...], value: Any
) -> None:
    thing = copy.deepcopy(one(kind))
    place = thing["spec"]
    for step in path[:-1]:
        place = place[step]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(thing, SCHEMAS[title_of(thing)])
