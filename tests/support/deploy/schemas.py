"""The versions of Kubernetes whose schemas hold, and the objects that have schemas of their own."""

from __future__ import annotations

from kubernetes_validate import utils

from tests.support.deploy.manifests import Object

OLDEST = "1.30"
"""The oldest Kubernetes that has everything on by default: since then `preStop` may sleep."""


def _parts(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


VERSIONS = sorted(
    {
        minor
        for version in utils.all_versions()
        if _parts(minor := utils.major_minor(version)) >= _parts(OLDEST)
    },
    key=_parts,
)


def is_custom(thing: Object) -> bool:
    group = thing["apiVersion"].partition("/")[0]
    return "." in group and not group.endswith(".k8s.io")
