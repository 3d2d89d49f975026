"""Makes base images from Debian's packages, with names and build arguments of published images."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.containers.engine import FOLDER, ContainersFailed, podman, run

MIRROR = "http://deb.debian.org/debian"
CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
"""This machine's certificates, copied so that builds have the same network access, also through a
proxy."""


@dataclass(frozen=True, slots=True)
class Base:
    """Debian's packages and settings that replace a published image."""

    name: str
    packages: Sequence[str]
    changes: Sequence[str]
    links: Sequence[tuple[str, str]] = ()
    """(path, destination) of symbolic links in the published image."""


PYTHON = Base(
    "docker.io/library/python:debian-bookworm",
    ("python3", "python3-dev", "python3-venv", "ca-certificates"),
    ('CMD ["python3"]',),
    (("usr/bin/python", "python3"),),
)
PROMETHEUS = Base(
    "docker.io/prom/prometheus:debian-bookworm",
    ("prometheus", "ca-certificates"),
    (
        "USER 65534",
        'ENTRYPOINT ["/usr/bin/prometheus"]',
        "VOLUME /prometheus",
        "WORKDIR /prometheus",
    ),
)
POSTGRES = Base(
    "docker.io/library/postgres:debian-bookworm",
    ("postgresql", "ca-certificates"),
    ("USER postgres", "ENV PATH=/usr/lib/postgresql/15/bin:/usr/bin:/bin"),
)


def digest(base: Base) -> str:
    """Returns the digest "sha256:..." that pins the image, and makes the image if it is missing.
    Raises ContainersFailed."""
    try:
        podman("image", "exists", base.name)
    except ContainersFailed:
        _make(base)
    return podman("image", "inspect", base.name, "--format", "{{.Digest}}").strip()


def _make(base: Base) -> None:
    print(f"making {base.name} from {' '.join(base.packages)}", flush=True)
    with tempfile.TemporaryDirectory(dir=FOLDER, prefix="base-") as folder:
        root = Path(folder, "root")
        include = f"--include={','.join(base.packages)}"
        run("debootstrap", "--variant=minbase", include, "bookworm", str(root), MIRROR)
        shutil.copyfile(Path("/", CERTIFICATES), root / CERTIFICATES)
        for path, target in base.links:
            (root / path).unlink(missing_ok=True)
            (root / path).symlink_to(target)
        archive = Path(folder, "root.tar")
        left_out = ("--exclude=./var/cache/apt/archives/*.deb", "--exclude=./var/lib/apt/lists/*")
        run("tar", "--directory", str(root), *left_out, "--create", "--file", str(archive), ".")
        changes = [argument for each in base.changes for argument in ("--change", each)]
        podman("import", *changes, str(archive), base.name)
