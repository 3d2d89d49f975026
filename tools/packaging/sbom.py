"""Writes the software bill of materials of a container image, in CycloneDX.

    python sbom.py NAME --report FILE... --debian STATUS OS_RELEASE > sbom.cdx.json

Python's packages come from the reports of `pip install --report`, with the SHA-256 of each
installed file; Debian's come from dpkg. The same components give the same bytes. The Dockerfile
copies only this file, so it imports nothing of ours.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import License
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NAMESPACE = uuid.UUID("6f1d2c0e-3c51-4f2b-9a53-0f6f5d6f2d2b")
"""Our namespace for a document's id, which is made from its content."""
_LONGEST_LICENSE = 64
"""Maximum length of a licence's name, because some packages have the whole text instead."""


@dataclass(frozen=True, slots=True)
class Package:
    """A distribution installed by pip, from its report."""

    metadata: dict[str, Any]
    sha256: str
    is_requested: bool
    extras: tuple[str, ...]

    @property
    def name(self) -> str:
        return canonicalize_name(self.metadata["name"])


def packages(report: dict[str, Any]) -> list[Package]:
    """Returns the packages in a report of `pip install`."""
    return [
        Package(
            each["metadata"],
            each["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256", ""),
            each["requested"],
            tuple(each.get("requested_extras", ())),
        )
        for each in report["install"]
    ]


def document(
    name: str,
    version: str,
    found: Iterable[Package],
    environment: dict[str, str],
    others: Iterable[Component] = (),
) -> str:
    """Returns the JSON of an image's components. `environment` has the values of markers."""
    by_name = {each.name: each for each in found}
    components = {name: _python_component(each) for name, each in by_name.items()}
    image = Component(name=name, version=version, type=ComponentType.CONTAINER, bom_ref=name)
    bom = Bom(components=[*components.values(), *others])
    bom.metadata.component = image
    requested = [components[name] for name, each in by_name.items() if each.is_requested]
    bom.register_dependency(image, [*requested, *others])
    for name, needed in sorted(dependencies(by_name, environment).items()):
        bom.register_dependency(components[name], [components[each] for each in needed])
    written: dict[str, Any] = json.loads(JsonV1Dot6(bom).output_as_string())
    del written["metadata"]["timestamp"], written["serialNumber"]
    content = json.dumps(written, sort_keys=True)
    written["serialNumber"] = uuid.uuid5(NAMESPACE, content).urn
    return json.dumps(written, indent=1, sort_keys=True) + "\n"


def dependencies(
    by_name: dict[str, Package], environment: dict[str, str]
) -> dict[str, frozenset[str]]:
    """Returns the dependencies of each package, including requested extras."""
    extras = {name: set(each.extras) for name, each in by_name.items()}
    found: dict[str, set[str]] = {name: set() for name in by_name}
    left = list(by_name)
    while left:
        name = left.pop()
        for line in by_name[name].metadata.get("requires_dist", ()):
            needed = Requirement(line)
            other = canonicalize_name(needed.name)
            if other not in by_name or not _applies(needed, extras[name], environment):
                continue
            found[name].add(other)
            if not needed.extras <= extras[other]:
                extras[other] |= needed.extras
                left.append(other)
    return {name: frozenset(others - {name}) for name, others in found.items()}


def _applies(needed: Requirement, extras: set[str], environment: dict[str, str]) -> bool:
    marker = needed.marker
    return marker is None or any(
        marker.evaluate({**environment, "extra": extra}) for extra in ("", *extras)
    )


def _python_component(package: Package) -> Component:
    version = package.metadata["version"]
    purl = PackageURL("pypi", None, package.name, version)
    digests = [HashType(alg=HashAlgorithm.SHA_256, content=package.sha256)]
    return Component(
        name=package.name,
        version=version,
        licenses=_licenses(package.metadata),
        hashes=digests if package.sha256 else [],
        purl=purl,
        bom_ref=purl.to_string(),
    )


def _licenses(metadata: dict[str, Any]) -> list[License]:
    """Returns the licence in the metadata: an expression, a short name, or classifiers."""
    factory = LicenseFactory()
    stated = metadata.get("license_expression") or metadata.get("license") or ""
    if stated and len(stated.splitlines()) == 1 and len(stated) <= _LONGEST_LICENSE:
        return [factory.make_from_string(stated)]
    if metadata.get("license_expression"):
        return [factory.make_with_expression(stated)]
    names = {
        each.rpartition(" :: ")[2]
        for each in metadata.get("classifier", ())
        if each.startswith("License :: ")
    }
    return [factory.make_with_name(each) for each in sorted(names)]


def debian_components(status: str, os_release: str) -> Iterator[Component]:
    """Yields the packages installed by dpkg, from its status file."""
    release = dict(line.split("=", 1) for line in os_release.splitlines() if "=" in line)
    codename = release["VERSION_CODENAME"].strip('"')
    for paragraph in status.split("\n\n"):
        fields = dict(re.findall(r"^([A-Za-z-]+): (.+)$", paragraph, flags=re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            name, version = fields["Package"], fields["Version"]
            where = {"arch": fields["Architecture"], "distro": codename}
            purl = PackageURL("deb", "debian", name, version, where)
            yield Component(name=name, version=version, purl=purl, bom_ref=purl.to_string())


def python_itself() -> Component:
    """Returns the running interpreter, which is not from a package in our images."""
    version = platform.python_version()
    purl = PackageURL("generic", None, "cpython", version)
    kind = ComponentType.PLATFORM
    return Component(
        name="cpython", version=version, type=kind, purl=purl, bom_ref=purl.to_string()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints an image's components as CycloneDX.")
    parser.add_argument("name", help="the image's name; its version is Loadout's in the reports")
    parser.add_argument(
        "--report", nargs="+", required=True, help="files of `pip install --report`"
    )
    parser.add_argument("--debian", nargs=2, required=True, metavar=("STATUS", "OS_RELEASE"))
    arguments = parser.parse_args()
    reports = [json.loads(Path(each).read_text()) for each in arguments.report]
    found = [package for each in reports for package in packages(each)]
    [version] = [each.metadata["version"] for each in found if each.name == "loadout"]
    status, os_release = (Path(each).read_text() for each in arguments.debian)
    others = [python_itself(), *debian_components(status, os_release)]
    environment = reports[0]["environment"]
    print(document(arguments.name, version, found, environment, others), end="")


if __name__ == "__main__":
    main()
