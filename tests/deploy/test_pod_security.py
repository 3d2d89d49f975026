"""Pods may do nothing that they need not: the profile "restricted", and a read-only root."""

from __future__ import annotations

from pathlib import Path

from tests.deploy import dockerfile
from tests.support.deploy.manifests import ROOT, gibibytes, variables

INCLUDES_WORKERS = True
ALLOWED_VOLUMES = {"emptyDir", "secret", "configMap", "persistentVolumeClaim"}
HOST_FIELDS = ("hostNetwork", "hostPID", "hostIPC", "hostUsers", "shareProcessNamespace")


def test_nobody_is_root(workload):
    context = workload.pod["securityContext"]
    image = dockerfile.parse(ROOT / "deploy/images/Dockerfile").stages["runtime"]
    uid, _, gid = image.last("USER").partition(":")
    assert context["runAsNonRoot"] is True
    assert (context["runAsUser"], context["runAsGroup"]) == (int(uid), int(gid))
    assert context["fsGroup"] == int(gid), "volumes are to be written, Secrets to be read"
    assert int(uid) > 0


def test_nothing_is_gained(workload):
    assert workload.pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in workload.all_containers:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context.get("privileged", False) is False
    assert not [field for field in HOST_FIELDS if workload.pod.get(field)]
    assert not [port for port in workload.container["ports"] if "hostPort" in port]
    for volume in workload.pod["volumes"]:
        assert volume.keys() - {"name"} <= ALLOWED_VOLUMES


def test_only_named_folders_can_be_written(workload):
    environment = workload.environment
    own = {environment.get("LOADOUT_STORE_DATA_DIR")}
    if socket := environment.get("LOADOUT_STORE_SHARE_SOCKET"):
        own.add(str(Path(socket).parent))
    allowed = [(workload.container, own)]
    allowed += [(each, {variables(each)["HF_HOME"]}) for each in workload.init_containers]
    for container, folders in allowed:
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        writable = {
            path: volume
            for path, volume in workload.mounts_in(container).items()
            if not volume["mount"].get("readOnly")
        }
        num_gpus = int(container["resources"]["limits"].get("nvidia.com/gpu", 0))
        shared = "/dev/shm" if num_gpus > 1 else None  # NCCL's
        assert set(writable) == {"/tmp", *folders, shared} - {None}
        for path in {"/tmp", shared} - {None}:
            assert "sizeLimit" in writable[path]["emptyDir"]


def test_the_images_caches_lie_in_folders_that_can_be_written(workload):
    """A variable of the image that names a folder names one in /tmp, or one of the image alone."""
    image = dockerfile.parse(ROOT / "deploy/images/Dockerfile")
    for target in ("cpu", "cuda"):
        folders = {
            name: value
            for name, value in image.environment(target).items()
            if name in ("HOME", "HF_HOME", "CUDA_CACHE_PATH", "TRITON_CACHE_DIR")
        }
        assert folders
        for path in folders.values():
            assert "emptyDir" in workload.mount_of(path)


def test_services_add_no_variables(workload):
    """A Service of the name loadout-store would add LOADOUT_STORE_PORT, and the like."""
    assert workload.pod["enableServiceLinks"] is False


def test_pods_ask_for_what_they_use(workload):
    for container in workload.all_containers:
        resources = container["resources"]
        assert {"cpu", "memory", "ephemeral-storage"} <= resources["requests"].keys()
        # More than was asked for is what the kernel kills first.
        assert resources["limits"]["memory"] == resources["requests"]["memory"]
    # What runs before takes nothing that the pod does not have anyway.
    most = gibibytes(workload.container["resources"]["limits"]["memory"])
    for container in workload.init_containers:
        assert gibibytes(container["resources"]["limits"]["memory"]) <= most
        assert "nvidia.com/gpu" not in container["resources"]["limits"]


def test_a_gpu_is_asked_for_where_one_computes(workload):
    if workload.module == "adapter_store":
        assert workload.container["image"].startswith("loadout-cpu:")
        return
    has_gpu = "nvidia.com/gpu" in workload.container["resources"]["limits"]
    assert has_gpu == (workload.environment["LOADOUT_INFERENCE_DEVICE"] == "cuda")
    assert has_gpu == workload.container["image"].startswith("loadout-cuda:")
    assert has_gpu == ("nvidia.com/gpu.present" in workload.pod.get("nodeSelector", {}))
    if has_gpu:
        assert "nvidia.com/gpu" in [each["key"] for each in workload.pod["tolerations"]]
