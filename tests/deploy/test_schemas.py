"""Every object is what Kubernetes, and the operators whose resources we use, say it must be."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest

from tests.support.deploy.manifests import BUILDS, Object, overlay
from tests.support.deploy.schemas import VERSIONS, is_custom

pytestmark = [
    pytest.mark.processes,  # kubectl builds what they read
    pytest.mark.usefixtures("schemas_are_read_once"),
]

SCHEMAS = Path(__file__).parent / "schemas"


CUSTOM = {json.loads(path.read_text())["title"]: path for path in SCHEMAS.glob("*.json")}
"""apiVersion/kind -> schema."""


def all_objects() -> dict[str, Object]:
    """Returns the objects of all overlays and components, equal ones once."""
    found = [each for name in BUILDS for each in overlay(name).objects]
    return {json.dumps(each, sort_keys=True): each for each in found}


def check_custom(thing: Object) -> None:
    """Raises jsonschema.ValidationError; fails for a kind of which there is no schema."""
    title = f"{thing['apiVersion']}/{thing['kind']}"
    assert title in CUSTOM, f"no schema of {title} under {SCHEMAS.name}/"
    jsonschema.validate(thing, json.loads(CUSTOM[title].read_text()))


@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])
def test_objects_are_valid(version):
    things = [each for each in all_objects().values() if not is_custom(each)]
    assert len(things) > 20
    for thing in things:
        assert kubernetes_validate.validate(thing, version, strict=True) == version


def test_custom_objects_are_valid():
    things = [each for each in all_objects().values() if is_custom(each)]
    assert {f"{each['apiVersion']}/{each['kind']}" for each in things} == set(CUSTOM)
    for thing in things:
        check_custom(thing)


@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])
def test_a_misspelt_field_is_refused(version):
    thing = copy.deepcopy(overlay("production").named("Deployment", "inference"))
    thing["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readynessProbe"):
        kubernetes_validate.validate(thing, version, strict=True)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("ServiceMonitor", "production-keda"),
        ("PrometheusRule", "production-keda"),
        ("ScaledObject", "production-keda"),
        ("LeaderWorkerSet", "dev-several-machines"),
        ("LeaderWorkerSet", "production-several-machines"),
    ],
)
def test_a_misspelt_field_of_a_custom_object_is_refused(kind, name):
    [thing, *_] = overlay(name).of_kind(kind)
    thing = copy.deepcopy(thing)
    thing["spec"]["endpoint"] = []
    with pytest.raises(jsonschema.ValidationError, match="endpoint"):
        check_custom(thing)


def test_everything_is_in_the_overlays_namespace(manifests):
    [namespace] = manifests.of_kind("Namespace")
    name = namespace["metadata"]["name"]
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    others = [each for each in manifests.objects if each is not namespace]
    scoped = [each for each in others if each["kind"] != "PersistentVolume"]
    assert {each["metadata"]["namespace"] for each in scoped} == {name}
    for each in others:
        assert each["metadata"]["labels"]["app.kubernetes.io/part-of"] == "loadout", each
