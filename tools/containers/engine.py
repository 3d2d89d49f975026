"""Runs Podman from Debian's packages, with its own configuration and storage under `.tools`."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".tools" / "containers"
PACKAGES = (
    *("podman", "buildah", "runc", "catatonit", "netavark", "aardvark-dns", "iptables"),
    "iproute2",
    "dnsmasq-base",  # the tests' cluster DNS
    "debootstrap",  # makes the base images
)
"""Packages to install in the system, which needs root."""

_CONTAINERS_CONF = """\
[containers]
default_ulimits = ["nofile={nofile}:{nofile}", "nproc={nproc}:{nproc}"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[network]
network_backend = "netavark"
network_config_dir = "{folder}/networks"
"""
_STORAGE_CONF = """\
[storage]
driver = "overlay"
graphroot = "{folder}/storage"
runroot = "{run}"
"""


class ContainersFailed(Exception):
    """A command of the container engine, or an installation, failed; the message has its output."""


def install_packages() -> None:
    """Installs the missing packages of `PACKAGES`. Raises ContainersFailed, also without apt."""
    known = "${db:Status-Status} ${Package}\n"
    listed = run("dpkg-query", "--show", f"--showformat={known}").splitlines()
    present = {line.split()[1] for line in listed if line.startswith("installed ")}
    missing = [each for each in PACKAGES if each not in present]
    if not missing:
        return
    if os.geteuid() != 0:
        raise ContainersFailed(f"as root: apt-get install {' '.join(missing)}")
    print(f"installing {' '.join(missing)}", flush=True)
    run("apt-get", "--quiet", "update")
    run("apt-get", "--quiet", "--yes", "install", "--no-install-recommends", *missing)


def write_configuration() -> None:
    """Writes the configuration, with limits within this machine's, because an engine that may not
    raise its limits would fail."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    text = _CONTAINERS_CONF.format(folder=FOLDER, **default_limits())
    (FOLDER / "containers.conf").write_text(text)
    # For this checkout alone, and short, because it has sockets.
    run = f"/run/loadout-{sha256(str(FOLDER).encode()).hexdigest()[:8]}"
    (FOLDER / "storage.conf").write_text(_STORAGE_CONF.format(folder=FOLDER, run=run))


def default_limits() -> dict[str, int]:
    """Returns the limits of containers that have none of their own, within this machine's."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    processes = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    return {"nofile": _limit(files, 65536), "nproc": _limit(processes, 4096)}


def _limit(hard: int, wanted: int) -> int:
    return wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)


def environment() -> dict[str, str]:
    """Returns the variables with which podman and its callers use our configuration."""
    return {
        **os.environ,
        "CONTAINERS_CONF": str(FOLDER / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(FOLDER / "storage.conf"),
    }


def podman(*arguments: str) -> str:
    """Runs podman and returns its standard output. Raises ContainersFailed."""
    return run("podman", *arguments)


def run(*command: str, folder: Path | None = None, log: Path | None = None) -> str:
    """Runs a command and returns its standard output, or writes it into `log`. Raises
    ContainersFailed."""
    if shutil.which(command[0]) is None:
        raise ContainersFailed(f"there is no {command[0]}: run `python -m tools.containers`")
    with open(log, "w") if log else nullcontext(subprocess.PIPE) as output:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT if log else subprocess.PIPE,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        said = log.read_text() if log else done.stdout + done.stderr
        last = "\n".join(said.splitlines()[-40:])
        raise ContainersFailed(f"`{' '.join(command)}` failed:\n{last}")
    return done.stdout or ""
