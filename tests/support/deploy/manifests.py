"""What `kubectl kustomize` makes of our folders, and the questions that tests ask of it."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.support.workers import share

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
COMPONENTS = sorted(path.name for path in (KUBERNETES / "components").iterdir())
EVERYTHING = "production-everything"
"""Not one that we ship: `production` with every component that it does not have."""
SCALED_TO_ZERO = "production-keda-scaled-to-zero"
"""Not one that we ship: `production-keda` with the component for it."""
BUILDS = [*OVERLAYS, EVERYTHING, SCALED_TO_ZERO]
HUB_MODEL = "Qwen/Qwen3-0.6B@c1899de289a04d12100db370d81485cdf75e47ca"
"""What EVERYTHING serves: its component model-download leaves open which model."""

Object = dict[str, Any]
Labels = dict[str, str]


def kustomize(folder: Path) -> list[Object]:
    """The objects that a kustomization stands for. Fails where there is no kubectl, and where it
    warns: of something that a later one refuses."""
    kubectl = shutil.which("kubectl")
    assert kubectl, "these tests need kubectl: what it builds is what is deployed"
    done = subprocess.run(
        [kubectl, "kustomize", str(folder)],
        env={**os.environ, "GOGC": "off"},  # it ends before it has garbage worth a collection
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return [each for each in yaml.load_all(done.stdout, yaml.CSafeLoader) if each]


@dataclass(frozen=True)
class Workload:
    """What runs pods: a Deployment, StatefulSet or DaemonSet, or the leaders or the workers of a
    LeaderWorkerSet. Each has one container, and inference may have one that runs before."""

    object: Object
    manifests: Manifests

    @property
    def name(self) -> str:
        return str(self.object["metadata"]["name"])

    @property
    def spec(self) -> Object:
        return dict(self.object["spec"])

    @property
    def labels(self) -> Labels:
        return dict(self.spec["template"]["metadata"]["labels"])

    @property
    def pod(self) -> Object:
        return dict(self.spec["template"]["spec"])

    @property
    def container(self) -> Object:
        [container] = self.pod["containers"]
        return dict(container)

    @property
    def init_containers(self) -> list[Object]:
        return [dict(each) for each in self.pod.get("initContainers", [])]

    @property
    def all_containers(self) -> list[Object]:
        return [*self.init_containers, self.container]

    @property
    def module(self) -> str:
        """The Python package that runs, "adapter_store" or "inference_svc"."""
        return str(self.container["args"][-1])

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}

    @property
    def probes(self) -> dict[str, Object]:
        return {
            kind: self.container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")
        }

    @property
    def environment(self) -> dict[str, str]:
        """Variables whose values are known here: of config maps, then of the container itself."""
        found: dict[str, str] = {}
        for source in self.container.get("envFrom", []):
            if "configMapRef" in source:
                found |= self.manifests.named("ConfigMap", source["configMapRef"]["name"])["data"]
        for variable in self.container.get("env", []):
            if "value" in variable:
                found[variable["name"]] = variable["value"]
        return found

    @property
    def secret_variables(self) -> dict[str, tuple[str, str]]:
        """Variable -> (Secret, key)."""
        references = {
            variable["name"]: variable["valueFrom"]["secretKeyRef"]
            for variable in self.container.get("env", [])
            if "valueFrom" in variable
        }
        return {name: (ref["name"], ref["key"]) for name, ref in references.items()}

    @property
    def secrets(self) -> set[str]:
        """Every Secret that the pod is given."""
        found = {secret for secret, _ in self.secret_variables.values()}
        for source in self.container.get("envFrom", []):
            if "secretRef" in source:
                found.add(source["secretRef"]["name"])
        found |= {v["secret"]["secretName"] for v in self.pod["volumes"] if "secret" in v}
        return found

    @property
    def mounts(self) -> dict[str, Object]:
        """Path in the container -> the volume there, with its mount as "mount"."""
        return self.mounts_in(self.container)

    def mounts_in(self, container: Object) -> dict[str, Object]:
        """Returns what `mounts` is, of any container of the pod."""
        volumes = {volume["name"]: volume for volume in self.pod["volumes"]}
        for claim in self.spec.get("volumeClaimTemplates", []):
            volumes[claim["metadata"]["name"]] = {"claim": claim["spec"]}
        return {
            mount["mountPath"]: {**volumes[mount["name"]], "mount": mount}
            for mount in container["volumeMounts"]
        }

    def mount_of(self, path: str) -> Object:
        """The mount that a path of the container lies on. Raises KeyError if it is the image's."""
        parents = [Path(path), *Path(path).parents]
        return next(self.mounts[str(each)] for each in parents if str(each) in self.mounts)


@dataclass(frozen=True)
class Manifests:
    """The objects of one kustomization."""

    objects: tuple[Object, ...]

    @classmethod
    def build(cls, folder: Path) -> Manifests:
        return cls(tuple(kustomize(folder)))

    def of_kind(self, *kinds: str) -> list[Object]:
        return [each for each in self.objects if each["kind"] in kinds]

    def named(self, kind: str, name: str) -> Object:
        found = [each for each in self.of_kind(kind) if each["metadata"]["name"] == name]
        assert len(found) == 1, f"{len(found)} objects {kind}/{name}"
        return found[0]

    @property
    def workloads(self) -> list[Workload]:
        """All but workers, which serve nobody."""
        kinds = ("Deployment", "StatefulSet", "DaemonSet")
        leaders = self._of_sets("leaderTemplate", 0)
        return [*(Workload(each, self) for each in self.of_kind(*kinds)), *leaders]

    @property
    def workers(self) -> list[Workload]:
        """The first worker of each LeaderWorkerSet."""
        return self._of_sets("workerTemplate", 1)

    def _of_sets(self, template: str, index: int) -> list[Workload]:
        return [
            Workload(_of_pods(each, template, index), self)
            for each in self.of_kind("LeaderWorkerSet")
        ]

    def workloads_with(self, labels: Labels) -> list[Workload]:
        """Returns the workloads whose pods carry the labels."""
        return [each for each in self.workloads if labels.items() <= each.labels.items()]


def _of_pods(thing: Object, name: str, index: int) -> Object:
    """Returns a LeaderWorkerSet as what runs the pods of one of its templates, with the variables
    that these are given, of the first group."""
    spec, metadata = thing["spec"], thing["metadata"]
    group = spec["leaderWorkerTemplate"]
    given = {
        "LWS_GROUP_SIZE": str(group["size"]),
        "LWS_WORKER_INDEX": str(index),
        "LWS_LEADER_ADDRESS": f"{metadata['name']}-0.{metadata['name']}.{metadata['namespace']}",
    }
    template = copy.deepcopy(group[name])
    for container in template["spec"]["containers"]:
        for variable in container["env"]:
            for key, value in given.items():
                if "value" in variable:
                    variable["value"] = variable["value"].replace(f"$({key})", value)
    label = "app.kubernetes.io/name"
    selector = {"matchLabels": {label: template["metadata"]["labels"][label]}}
    return {**thing, "spec": {**spec, "template": template, "selector": selector}}


HUB_SETTINGS = {
    "name": "inference-config",
    "behavior": "merge",
    "literals": [f"LOADOUT_INFERENCE_MODEL={HUB_MODEL}"],
}


@cache
def overlay(name: str) -> Manifests:
    """One that we ship, or EVERYTHING. One worker of a run builds it."""
    return share.once(f"overlay-{name}", lambda: _built(name))


def _built(name: str) -> Manifests:
    if name == EVERYTHING:
        folders = [f"kubernetes/components/{each}" for each in _further()]
        return compose("production", *folders, configMapGenerator=[HUB_SETTINGS])
    if name == SCALED_TO_ZERO:
        return compose("production-keda", "kubernetes/components/keda-scale-to-zero")
    return Manifests.build(KUBERNETES / "overlays" / name)


def _further() -> list[str]:
    """Without keda, which is there in place of hpa, and without what takes the stores away."""
    text = (KUBERNETES / "overlays" / "production" / "kustomization.yaml").read_text()
    present = {Path(each).name for each in yaml.safe_load(text)["components"]}
    left_out = {"keda", "keda-scale-to-zero", "inference-only"}
    return [each for each in COMPONENTS if each not in present | left_out]


def compose(name: str, *components: str, **fields: Any) -> Manifests:
    """What an overlay of somebody's own makes of one of ours: with components, by their folders
    under deploy/, and further fields of a kustomization."""
    with tempfile.TemporaryDirectory() as folder:
        here = os.path.relpath(DEPLOY, folder)
        [namespace] = overlay(name).of_kind("Namespace")
        kustomization = {
            "kind": "Kustomization",
            "namespace": namespace["metadata"]["name"],
            "resources": [f"{here}/kubernetes/overlays/{name}"],
            "components": [f"{here}/{each}" for each in components],
            **{key: _relocated(value, here) for key, value in fields.items()},
        }
        Path(folder, "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        return Manifests.build(Path(folder))


def _relocated(value: Any, here: str) -> Any:
    """Folders under deploy/ are written deploy/..."""
    if isinstance(value, list):
        return [_relocated(each, here) for each in value]
    return value.replace("deploy/", f"{here}/") if isinstance(value, str) else value


def all_workloads() -> Iterator[tuple[str, Workload]]:
    """(overlay, workload) of all overlays."""
    for name in BUILDS:
        for workload in overlay(name).workloads:
            yield name, workload


def gibibytes(quantity: str) -> float:
    """A quantity of Kubernetes such as 512Mi or 16Gi. Raises KeyError for another unit."""
    units = {"Mi": 1 / 1024, "Gi": 1.0, "Ti": 1024.0}
    return float(quantity[:-2]) * units[quantity[-2:]]


def matches(selector: Object, labels: Labels) -> bool:
    """Decides as Kubernetes does; knows only In, the one operator that we use."""
    wanted = selector.get("matchLabels", {})
    expressions = selector.get("matchExpressions", [])
    assert all(each["operator"] == "In" for each in expressions)
    return wanted.items() <= labels.items() and all(
        labels.get(each["key"]) in each["values"] for each in expressions
    )


def variables(container: Object) -> dict[str, str]:
    """Returns the values of the container's own variables."""
    return {each["name"]: each["value"] for each in container.get("env", ()) if "value" in each}
