"""The example for inference gateways: its parts fit together."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.support.deploy.manifests import Manifests, Object, Workload, compose
from tests.support.deploy.policies import Peer, lets_through
from tests.support.deploy.schemas import VERSIONS, is_custom

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("schemas_are_read_once")]

SCHEMAS = {
    schema["title"]: schema
    for schema in (
        json.loads(path.read_text())
        for path in (Path(__file__).parent / "schemas" / "gateway").glob("*.json")
    )
}
"""apiVersion/kind -> schema."""
SCRAPED_OVER_TLS = {"scheme": "https", "insecureSkipVerify": True}


@pytest.fixture(scope="module")
def dev() -> Manifests:
    return compose("dev", "gateway")


@pytest.fixture(scope="module")
def production() -> Manifests:
    return compose("production", "kubernetes/components/http", "gateway", "gateway/tls")


@pytest.fixture(scope="module", params=["dev", "production"])
def built(request: pytest.FixtureRequest) -> Manifests:
    found: Manifests = request.getfixturevalue(request.param)
    return found


def one(built: Manifests, kind: str) -> Object:
    [found] = built.of_kind(kind)
    return found


def picker_of(built: Manifests) -> Workload:
    [found] = [each for each in built.workloads if each.name == "loadout-picker"]
    return found


def inference_of(built: Manifests) -> Workload:
    [found] = [each for each in built.workloads if each.name == "inference"]
    return found


def config_of(built: Manifests) -> Object:
    [name] = [v["configMap"]["name"] for v in picker_of(built).pod["volumes"] if "configMap" in v]
    [text] = built.named("ConfigMap", name)["data"].values()
    config: Object = yaml.safe_load(text)
    return config


def test_the_pool_is_what_the_route_leads_to(built: Manifests) -> None:
    pool = one(built, "InferencePool")
    [rule] = one(built, "HTTPRoute")["spec"]["rules"]
    [backend] = rule["backendRefs"]
    assert backend["kind"] == pool["kind"]
    assert backend["name"] == pool["metadata"]["name"]
    assert backend["group"] == pool["apiVersion"].partition("/")[0]
    [parent] = one(built, "HTTPRoute")["spec"]["parentRefs"]
    assert parent == {"name": one(built, "Gateway")["metadata"]["name"]}
    assert set(rule["timeouts"].values()) == {"0s"}, "no timeouts on token streams"


def test_the_pool_is_the_front_of_the_replicas(built: Manifests) -> None:
    spec, inference = one(built, "InferencePool")["spec"], inference_of(built)
    assert spec["selector"]["matchLabels"].items() <= inference.labels.items()
    [port] = spec["targetPorts"]
    assert port["number"] == inference.ports["http"]
    assert inference.environment["LOADOUT_INFERENCE_HTTP"] == f"0.0.0.0:{port['number']}"


def test_the_picker_may_scrape_and_nobody_unasked(built: Manifests) -> None:
    inference, picker = inference_of(built), picker_of(built)
    assert inference.environment["LOADOUT_INFERENCE_HTTP_OPEN_METRICS"] == "true"
    policies, own = built.of_kind("NetworkPolicy"), Peer.of(inference)
    stranger = Peer("stranger", own.namespace, {"app": "stranger"})
    for other, is_let_in in ((Peer.of(picker), True), (stranger, False)):
        assert lets_through(policies, other, own, own.ports["http"]) == is_let_in


def test_the_picker_speaks_tls_where_replicas_do(dev: Manifests, production: Manifests) -> None:
    for built, parameters in ((dev, []), (production, [SCRAPED_OVER_TLS])):
        has_tls = "LOADOUT_INFERENCE_TLS_CERT_FILE" in inference_of(built).environment
        assert has_tls == bool(parameters)
        plugins = config_of(built)["plugins"]
        found = [p["parameters"] for p in plugins if p["type"] == "metrics-data-source"]
        assert found == parameters
    plain, other = config_of(dev), config_of(production)
    other["plugins"] = [p for p in other["plugins"] if p["type"] != "metrics-data-source"]
    assert other == plain


def test_the_picker_is_found_and_knows_its_pool(built: Manifests) -> None:
    pool, picker = one(built, "InferencePool"), picker_of(built)
    reference = pool["spec"]["endpointPickerRef"]
    service = built.named("Service", reference["name"])
    [port] = service["spec"]["ports"]
    assert reference["port"]["number"] == port["port"]
    assert service["spec"]["selector"].items() <= picker.labels.items()
    assert picker.spec["selector"]["matchLabels"].items() <= picker.labels.items()
    arguments = dict(each.split("=") for each in picker.container["args"])
    assert arguments["--pool-name"] == pool["metadata"]["name"]
    assert int(arguments["--grpc-port"]) == picker.ports[port["targetPort"]]
    assert int(arguments["--grpc-health-port"]) == picker.ports["health"]


def test_the_picker_s_plugins_exist(built: Manifests) -> None:
    config, picker = config_of(built), picker_of(built)
    [profile] = config["schedulingProfiles"]
    declared = {plugin["type"] for plugin in config["plugins"]}
    assert {plugin["pluginRef"] for plugin in profile["plugins"]} <= declared
    [path] = [a for a in picker.container["args"] if a.startswith("--config-file=")]
    volume = picker.mount_of(path.partition("=")[2])
    assert built.named("ConfigMap", volume["configMap"]["name"])["data"].keys() == {"config.yaml"}
    assert path.endswith("/config.yaml")


def title_of(thing: Object) -> str:
    return f"{thing['apiVersion']}/{thing['kind']}"


def is_gateways(thing: Object) -> bool:
    """Whether the object is of an API that clusters get from elsewhere."""
    return title_of(thing) in SCHEMAS


@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])
def test_objects_are_what_the_gateway_apis_and_kubernetes_say(
    built: Manifests, version: str
) -> None:
    custom = [each for each in built.objects if is_gateways(each)]
    assert {title_of(each) for each in custom} == set(SCHEMAS)
    for each in custom:
        jsonschema.validate(each, SCHEMAS[title_of(each)])
    own = [each for each in built.objects if not is_gateways(each) and not is_custom(each)]
    for each in own:
        if each["metadata"]["name"].startswith(("loadout-picker", "inference")):
            kubernetes_validate.validate(each, version, strict=True)


def test_everything_is_in_one_namespace_and_labelled(built: Manifests) -> None:
    [namespace] = built.of_kind("Namespace")
    for each in built.objects:
        if each is not namespace:
            assert each["metadata"]["namespace"] == namespace["metadata"]["name"]
            assert each["metadata"]["labels"]["app.kubernetes.io/part-of"] == "loadout", each


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
    kind: str, path: tuple[str | int, ...], value: Any, dev: Manifests
) -> None:
    thing = copy.deepcopy(one(dev, kind))
    place = thing["spec"]
    for step in path[:-1]:
        place = place[step]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(thing, SCHEMAS[title_of(thing)])
