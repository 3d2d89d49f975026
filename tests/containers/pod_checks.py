"""What a running container must have of its manifest."""

from __future__ import annotations

from tests.containers.pods import Pod
from tests.support.deploy.manifests import gibibytes


def check_user(pod: Pod) -> None:
    context = pod.workload.pod["securityContext"]
    status = read_status(pod)
    assert set(status["Uid"].split()) == {str(context["runAsUser"])}
    assert set(status["Gid"].split()) == {str(context["runAsGroup"])}


def check_privileges(pod: Pod) -> None:
    """No capabilities, none to be gained, and the runtime's filter of system calls."""
    status = read_status(pod)
    assert int(status["CapBnd"], 16) == int(status["CapEff"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"


def check_mounts(pod: Pod) -> None:
    """The root is read-only, and of what is mounted what the manifest says."""
    # Fields of a line: id, parent, device, root, mount point, options, ...
    lines = [each.split() for each in pod.execute("cat", "/proc/1/mountinfo").stdout.splitlines()]
    is_read_only = {line[4]: "ro" in line[5].split(",") for line in lines}
    wanted = {path: is_mounted_read_only(each) for path, each in pod.workload.mounts.items()}
    assert {path: is_read_only[path] for path in ("/", *wanted)} == {"/": True, **wanted}


def check_limits(pod: Pod) -> None:
    limits = pod.workload.container["resources"]["limits"]
    given = pod.inspect()["HostConfig"]
    assert given["Memory"] == gibibytes(limits["memory"]) * 2**30
    if "cpu" in limits:
        assert given["NanoCpus"] == int(limits["cpu"]) * 10**9


def check_command(pod: Pod) -> None:
    """Python is the one that the image finds."""
    command = pod.execute("cat", "/proc/1/cmdline").stdout.rstrip("\0").split("\0")
    assert command[1:] == pod.workload.container["args"][1:]


def check_probes(pod: Pod) -> None:
    assert {kind: pod.probe(kind) for kind in pod.workload.probes} == dict.fromkeys(
        ("startup", "readiness", "liveness"), True
    )


CHECKS = (
    check_user,
    check_privileges,
    check_mounts,
    check_limits,
    check_command,
    check_probes,
)


def read_status(pod: Pod) -> dict[str, str]:
    lines = pod.execute("cat", "/proc/1/status").stdout.splitlines()
    return dict(line.split(":\t", 1) for line in lines)


def is_mounted_read_only(mounted: dict[str, object]) -> bool:
    mount = mounted["mount"]
    assert isinstance(mount, dict)
    return bool(mount.get("readOnly"))
