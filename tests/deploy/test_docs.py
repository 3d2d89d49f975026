"""docs/kubernetes.md: its example builds, and what it names is there."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml

import inference_svc.api.http.app
from adapter_store.config import StoreSettings
from adapter_store.registration.tenant_policy import parse_policy
from inference_svc.config import split_hub_name
from tests.support import forks
from tests.support.deploy.manifests import (
    COMPONENTS,
    OVERLAYS,
    ROOT,
    Manifests,
    Object,
    compose,
    gibibytes,
    overlay,
)
from tests.support.deploy.page import DOCS, DOCUMENTED
from tests.support.deploy.schemas import VERSIONS, is_custom
from tests.support.deploy.settings import CLASSES

pytestmark = pytest.mark.processes


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", DOCS, re.MULTILINE | re.DOTALL)


OBJECTS = [yaml.safe_load(text) for text in blocks("yaml")]
"""A kustomization, a claim, and changes of the kustomization."""


def built(folder: Path, change: Object) -> Manifests:
    """The kustomization that the page shows, beside this checkout, with a change."""
    _write(folder, yaml.safe_dump(OBJECTS[0] | change))
    return Manifests.build(folder)


def _write(folder: Path, text: str, checkout: str = "../loadout/") -> None:
    here = os.path.relpath(ROOT, folder)
    (folder / "kustomization.yaml").write_text(text.replace(checkout, f"{here}/"))


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> Manifests:
    return built(tmp_path_factory.mktemp("own"), {})


def change_of(*fields: str, naming: str = "") -> Object:
    """Returns the change of these fields, the one that names something if there are several."""
    [found] = [
        each
        for each in OBJECTS[1:]
        if set(each) == set(fields) and naming in yaml.safe_dump(each, width=1000)
    ]
    return found


def test_the_label_of_a_prometheus_reaches_monitors_and_rules(tmp_path):
    made = built(tmp_path, change_of("patches", naming="release"))
    found = made.of_kind("ServiceMonitor", "PrometheusRule")
    assert len(found) == 3
    for each in found:
        assert each["metadata"]["labels"]["release"] == "kube-prometheus-stack"
        assert each["metadata"]["labels"]["app.kubernetes.io/part-of"] == "loadout"


def test_another_namespace_is_whole(tmp_path):
    made = built(tmp_path, change_of("namespace", "transformers"))
    texts = yaml.safe_dump_all(made.objects)
    assert "loadout-eu.svc" in texts
    assert not re.search(r"\bloadout\.svc|namespace: loadout$", texts, re.MULTILINE)


def test_spans_go_to_a_collector_of_ones_own(tmp_path):
    change = change_of("components", "patches", naming="OTLP")
    for workload in built(tmp_path, change).workloads:
        prefix, _ = CLASSES[workload.module]
        assert workload.environment[f"{prefix}OTLP_ENDPOINT"] == "http://collector.tracing.svc:4317"


def test_the_model_comes_from_the_hub(tmp_path):
    made = built(tmp_path, change_of("components", "configMapGenerator"))
    [inference] = [each for each in made.workloads if each.module == "inference_svc"]
    [downloader] = inference.init_containers
    assert downloader["image"] == inference.container["image"]
    assert downloader["image"].startswith("registry.example/")
    assert split_hub_name(inference.environment["LOADOUT_INFERENCE_MODEL"])[1] == "COMMIT"
    assert made.named("PersistentVolumeClaim", "model-cache")


def test_the_models_volume_can_be_the_pods_own(tmp_path):
    made = built(tmp_path, change_of("components", "patches", naming="emptyDir"))
    assert not made.of_kind("PersistentVolumeClaim")
    [inference] = [each for each in made.workloads if each.module == "inference_svc"]
    for container in inference.all_containers:
        volume = inference.mounts_in(container)["/models/huggingface"]
        assert volume.keys() == {"name", "emptyDir", "mount"}
        size = gibibytes(volume["emptyDir"]["sizeLimit"])
    tmp = gibibytes(inference.mounts["/tmp"]["emptyDir"]["sizeLimit"])
    requests = inference.container["resources"]["requests"]
    assert gibibytes(requests["ephemeral-storage"]) >= size + tmp
    assert kubernetes_validate.validate(inference.object, VERSIONS[0], strict=True)


def test_a_node_without_a_folder_streams():
    made = compose("node-local-store", **change_of("patches", naming="both"))
    assert not made.of_kind("PersistentVolume", "PersistentVolumeClaim")
    for name in ("adapter-store-node", "inference"):
        [workload] = [each for each in made.workloads if each.name == name]
        assert workload.mounts["/run/loadout"]["emptyDir"] == {"sizeLimit": "1Mi"}


def test_a_nodes_folder_is_the_volumes():
    [made] = re.findall(r"^mkdir -p -m 0755 (\S+)$", "\n".join(blocks("sh")), re.MULTILINE)
    [volume] = overlay("node-local-store").of_kind("PersistentVolume")
    assert volume["spec"]["local"]["path"] == made


@pytest.fixture
def two_models(tmp_path) -> Callable[[Object], Manifests]:
    """`two_models(change)`: the page's folders `first`, with a change, and `second`, together."""

    def build(change: Object) -> Manifests:
        built(_folder(tmp_path / "first"), change)
        [second] = [each for each in OBJECTS if "nameSuffix" in each]
        _write(_folder(tmp_path / "second"), yaml.safe_dump(second), "../../loadout/")
        _write(tmp_path, yaml.safe_dump({"resources": ["first", "second"]}))
        return Manifests.build(tmp_path)

    return build


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_two_models_share_what_is_not_inferences(two_models):
    made = two_models(change_of("patches", naming="Certificate"))
    names = {
        name for each in made.of_kind("Certificate") for name in each["spec"].get("dnsNames", [])
    }
    for service in made.of_kind("Service"):
        name = service["metadata"]["name"]
        assert {name, f"{name}.loadout.svc"} <= names
    services = {each.name: each for each in made.workloads if each.module == "inference_svc"}
    models = {
        name: each.environment["LOADOUT_INFERENCE_BASE_MODEL"] for name, each in services.items()
    }
    assert models == {"inference": "Qwen/Qwen3-8B", "inference-second": "Qwen/Qwen3-4B"}
    assert len({each.container["image"] for each in services.values()}) == 1
    kinds = [each["kind"] for each in made.objects]
    shipped = [each["kind"] for each in overlay("two-models").objects]
    of_cert_manager = kinds.count("Certificate") + kinds.count("Issuer")
    assert len(kinds) == len(shipped) + of_cert_manager


def test_two_models_share_the_cache_of_what_is_downloaded(two_models, tmp_path):
    change = change_of("components", "configMapGenerator")
    [second] = [each for each in OBJECTS if "nameSuffix" in each]
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(second, "patches")
        made = two_models(change)
    assert len(made.of_kind("PersistentVolumeClaim")) == 1
    for workload in made.workloads:
        if workload.module == "inference_svc":
            volume = workload.mounts["/models/huggingface"]
            assert volume["persistentVolumeClaim"]["claimName"] == "model-cache"
            [downloader] = workload.init_containers
            assert downloader["envFrom"] == workload.container["envFrom"]


def test_the_clusters_of_kind_get_the_image_that_dev_runs():
    [loading] = [text for text in blocks("sh") if "kind load" in text]
    image = loading.splitlines()[-1].split()[-1]
    assert {each.container["image"] for each in overlay("dev").workloads} == {image}


def test_the_claim_is_what_pods_mount(example):
    [claim] = [each for each in OBJECTS if each.get("kind") == "PersistentVolumeClaim"]
    assert kubernetes_validate.validate(claim, VERSIONS[0], strict=True)
    [inference] = [each for each in example.workloads if each.module == "inference_svc"]
    [volume] = [v for v in inference.pod["volumes"] if "persistentVolumeClaim" in v]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["metadata"]["namespace"] == inference.object["metadata"]["namespace"]


def test_the_steps_make_the_secrets(tmp_path):
    """The commands run as the page has them, but for the cluster."""
    [making] = [text for text in blocks("sh") if "make_token" in text]
    [creating] = [text for text in blocks("sh") if "create secret" in text]
    commands = [f"{line} --dry-run=client -o yaml; echo ---" for line in creating.splitlines()]
    done = subprocess.run(
        ["sh", "-e", "-c", making + "\n".join(commands)],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{forks.programs()}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    secrets = {each["metadata"]["name"]: each for each in yaml.safe_load_all(done.stdout) if each}
    for name, secret in secrets.items():
        assert f"| `{name}` | Secret | `{next(iter(secret['data']))}` |" in DOCS
    policy = parse_policy((tmp_path / "policy.toml").read_text())
    shown = b64decode(secrets["inference-store-token"]["data"]["token"]).decode().strip()
    assert policy.authenticate(shown).roles == {"server"}
    for name, role in (("trainer", "publisher"), ("operations", "admin")):
        token = (tmp_path / f"{name}.token").read_text().strip()
        assert role in policy.authenticate(token).roles
    dsn = b64decode(secrets["adapter-store-catalog"]["data"]["dsn"]).decode()
    assert (
        StoreSettings(catalog_dsn=dsn, shared_s3="s3://bucket").catalog_dsn.get_secret_value()
        == dsn
    )


def test_commands_name_what_the_cluster_will_have(example):
    """Folders, objects and ports, in the namespaces of the overlays that they are about."""
    manifests = {"loadout-dev": overlay("dev"), "loadout": example}
    lines = [line for text in blocks("sh") for line in text.splitlines()]
    commands = [
        line.split() for line in lines if line.startswith("kubectl") and "secret" not in line
    ]
    for command in commands:
        match command:
            case ["kubectl", "-n", namespace, "rollout", "status", place]:
                kind, name = place.split("/")
                kinds = {"statefulset": "StatefulSet", "deployment": "Deployment"}
                found = manifests[namespace].named(kinds[kind], name)
                assert found["metadata"]["namespace"] == namespace
            case ["kubectl", "-n", namespace, "port-forward", place, port, "&"]:
                found = manifests[namespace].named("Service", place.removeprefix("service/"))
                assert int(port) in {each["port"] for each in found["spec"]["ports"]}
            case ["kubectl", "apply", "-k", folder]:
                assert folder == "." or (ROOT / folder / "kustomization.yaml").is_file()
            case ["kubectl", "apply", "-f", path] if path.startswith("../loadout/"):
                assert (ROOT / path.removeprefix("../loadout/")).is_file()
            case _:
                assert command == ["kubectl", "apply", "-f", "base-model.yaml"], "the page's claim"
    assert {command[1] for command in commands} == {"apply", "-n"}
    [url] = [each for line in lines if line.startswith("curl") for each in line.split()[1:2]]
    address = urlsplit(url)
    assert ["kubectl", "-n", "loadout-dev", "port-forward", "service/inference"] in [
        command[:5] for command in commands if str(address.port) in command
    ]
    assert f'Route("{address.path}"' in inspect.getsource(inference_svc.api.http.app)


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
    assert len(DOCUMENTED) == 10
    assert any(is_custom(each) for each in production.objects)
