"""docs/kubernetes.md: its example builds, and what it names is there."""

from __future__ import annotations

import os
import re

import pytest

from tests.deploy.manifests import COMPONENTS, OVERLAYS, ROOT, Manifests, overlay
from tests.deploy.test_references import DOCS, DOCUMENTED
from tests.deploy.test_schemas import VERSIONS, is_custom
from tests.deploy.test_settings import CLASSES


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> Manifests:
    """The kustomization that the page shows, beside this checkout."""
    [text] = re.findall(r"^```yaml\n(.*?)^```$", DOCS, re.MULTILINE | re.DOTALL)
    folder = tmp_path_factory.mktemp("own")
    here = os.path.relpath(ROOT, folder)
    (folder / "kustomization.yaml").write_text(text.replace("../loadout/", f"{here}/"))
    return Manifests.build(folder)


def test_the_example_changes_images_and_settings(example):
    for workload in example.workloads:
        assert workload.container["image"].startswith("registry.example/loadout-")
        prefix, kind = CLASSES[workload.module]
        for name in workload.environment:
            assert name.removeprefix(prefix).lower() in kind.model_fields
    [store] = [each for each in example.workloads if each.module == "adapter_store"]
    assert store.environment["LOADOUT_STORE_SHARED_S3"] == "s3://my-loadout/store"
    assert store.environment["LOADOUT_STORE_POLICY_FILE"], "what the overlay says stays"


def test_certificates_fill_the_secrets_that_pods_mount(example):
    certificates = {c["spec"]["secretName"]: c["spec"] for c in example.of_kind("Certificate")}
    mounted = {name for workload in example.workloads for name in workload.secrets}
    assert {name for name in mounted if name.endswith("-tls")} <= certificates.keys()
    for spec in certificates.values():
        assert example.named("Issuer", spec["issuerRef"]["name"])
    for issuer in example.of_kind("Issuer"):
        if "ca" in issuer["spec"]:
            assert issuer["spec"]["ca"]["secretName"] in certificates


def test_certificates_are_for_the_names_that_are_called(example):
    names = {
        name for each in example.of_kind("Certificate") for name in each["spec"].get("dnsNames", [])
    }
    namespace = example.of_kind("Namespace")[0]["metadata"]["name"]
    for service in example.of_kind("Service"):
        name = service["metadata"]["name"]
        assert {name, f"{name}.{namespace}.svc"} <= names
    assert "adapter-store-node" in names, "of the overlay node-local-store"


def test_certificates_are_renewed_long_before_they_end(example):
    for each in example.of_kind("Certificate"):
        spec = each["spec"]
        if not spec.get("isCA"):
            days = {field: int(spec[field][:-1]) / 24 for field in ("duration", "renewBefore")}
            assert days["renewBefore"] == 30, "the page says a month"
            assert days["duration"] >= 2 * days["renewBefore"]


def test_every_overlay_and_component_is_explained():
    for name in OVERLAYS:
        assert f"| `{name}` |" in DOCS
    for name in COMPONENTS:
        assert f"| `{name}` |" in DOCS


def test_links_lead_somewhere():
    pages = {"docs": DOCS, "deploy": (ROOT / "deploy" / "README.md").read_text()}
    for folder, text in pages.items():
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert (ROOT / folder / target).exists(), target


def test_numbers_are_the_overlays():
    production = overlay("production")
    for workload in production.workloads:
        prefix, _ = CLASSES[workload.module]
        grace = workload.environment[f"{prefix}GRACE_SECONDS"]
        assert f"`{prefix}GRACE_SECONDS` ({grace})" in DOCS
        sleep = workload.container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert sleep == 10, "the page says ten seconds"
    assert f"Kubernetes {VERSIONS[0]} or newer" in DOCS
    assert len(DOCUMENTED) == 7
    assert any(is_custom(each) for each in production.objects)
