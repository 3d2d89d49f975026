"""What `podman kube play` is given of a workload: the pod that a controller makes of its template,
with this machine's volumes. What Podman does not know goes: probes over gRPC and preStop, which
`pods` does, and values of Secrets, which it is given as they are."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from tests.support.deploy.manifests import Object, Workload
from tools.containers.engine import podman

NOT_PLAYED = ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "ports")
"""Ports, because Podman would take them of this machine, too."""
DATA = "..data"


@dataclass(frozen=True)
class Provided:
    """What pods find: the cluster's DNS, and what its users bring, under `folder`: Secrets, and
    claims by the folder of this machine that they mount."""

    folder: Path
    resolv_conf: Path
    secrets: dict[str, Mapping[str, bytes]] = field(default_factory=dict)
    claims: Mapping[str, Path] = field(default_factory=dict)

    def put_secret(self, name: str, values: Mapping[str, bytes], group: int) -> None:
        """Writes a Secret's files as the kubelet does, or new values of it: a link to the folder of
        all of them is replaced, so that a reader sees either all old ones or all new ones."""
        self.secrets[name] = values
        mounted = self.secret_folder(name)
        version = f"..{len(list(mounted.glob('..[0-9]*'))) if mounted.exists() else 0}"
        (mounted / version).mkdir(parents=True)
        for key, value in values.items():
            file = mounted / version / key
            file.write_bytes(value)
            file.chmod(0o440)
            os.chown(file, 0, group)
            if not (mounted / key).is_symlink():
                (mounted / key).symlink_to(f"{DATA}/{key}")
        (mounted / "..new").symlink_to(version)
        (mounted / "..new").rename(mounted / DATA)

    def secret_folder(self, name: str) -> Path:
        return self.folder / "secrets" / name


def pod_objects(workload: Workload, name: str, provided: Provided) -> list[Object]:
    """The ConfigMaps and the pod `name`, as Podman plays them; makes the volumes."""
    spec = yaml.safe_load(yaml.safe_dump(workload.pod))  # a copy, which may be changed
    group = spec["securityContext"]["fsGroup"]
    claimed = {each["metadata"]["name"] for each in workload.spec.get("volumeClaimTemplates", [])}
    claims = [{"name": each, "persistentVolumeClaim": {}} for each in sorted(claimed)]
    spec["volumes"] = [
        _volume(each, name, group, provided) for each in [*spec.get("volumes", []), *claims]
    ]
    resolv_conf = {"path": str(provided.resolv_conf), "type": "File"}
    spec["volumes"].append({"name": "resolv-conf", "hostPath": resolv_conf})
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        for key in NOT_PLAYED:
            container.pop(key, None)
        mount = {"name": "resolv-conf", "mountPath": "/etc/resolv.conf", "readOnly": True}
        container["volumeMounts"] = [*container.get("volumeMounts", []), mount]
        container["args"] = [_expanded(each, workload) for each in container["args"]]
        container["env"] = list(_variables(container, provided))
        container["envFrom"] = [
            each for each in container.get("envFrom", []) if "configMapRef" in each
        ]
    labels = {**workload.labels, "loadout-test": "true"}
    pod = {"apiVersion": "v1", "kind": "Pod", "spec": spec}
    # Podman 4.3 fails to remove init containers that ran once.
    annotations = {"io.podman.annotations.init.container.type": "always"}
    pod["metadata"] = {"name": name, "labels": labels, "annotations": annotations}
    return [*map(_unscoped, workload.manifests.of_kind("ConfigMap")), pod]


def _expanded(argument: str, workload: Workload) -> str:
    """`$(NAME)` is a variable, which the kubelet knows and Podman does not."""
    return re.sub(r"\$\((\w+)\)", lambda found: workload.environment[found[1]], argument)


def _unscoped(item: Object) -> Object:
    metadata = {key: value for key, value in item["metadata"].items() if key != "namespace"}
    return {**item, "metadata": metadata}


def _volume(volume: Object, pod: str, group: int, provided: Provided) -> Object:
    name = volume["name"]
    if "secret" in volume:
        return _folder(name, provided.secret_folder(volume["secret"]["secretName"]))
    claim = volume.get("persistentVolumeClaim", {}).get("claimName")
    if claim in provided.claims:
        return _folder(name, provided.claims[claim])
    own = claim or f"{name}-{pod}"
    options = ("--label", "loadout-test=true", "--opt", f"o=uid={group},gid={group}")
    # As fsGroup has it: the group of the pod may write.
    if own not in podman("volume", "ls", "--quiet").split():
        podman("volume", "create", *options, own)
    return {"name": name, "persistentVolumeClaim": {"claimName": own}}


def _folder(name: str, folder: Path) -> Object:
    return {"name": name, "hostPath": {"path": str(folder), "type": "Directory"}}


def _variables(container: Object, provided: Provided) -> Iterator[Object]:
    """The container's own, and those of Secrets by their values."""
    for source in container.get("envFrom", []):
        if "secretRef" in source:
            for key, value in provided.secrets.get(source["secretRef"]["name"], {}).items():
                yield {"name": key, "value": value.decode()}
    for variable in container.get("env", []):
        if "valueFrom" in variable:
            reference = variable["valueFrom"]["secretKeyRef"]
            secret = provided.secrets.get(reference["name"])
            if secret is not None or not reference.get("optional"):
                yield {"name": variable["name"], "value": secret[reference["key"]].decode()}
        else:
            yield variable
