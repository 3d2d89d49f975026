"""Queries an advisory service for known vulnerabilities of the versions in constraints.txt.

    python -m tools.packaging.audit [--osv-url URL]

pip-audit queries OSV. The exit code is 1 if there are vulnerabilities, and 2 if a package has no
answer, because a missing answer does not mean that it is safe.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.packaging.constraints import Pin, read
from tools.packaging.requirements import CONSTRAINTS

ROOT = Path(__file__).parents[2]
OSV_URL = "https://api.osv.dev/v1/query"


class NoAnswer(Exception):
    """The service did not answer for all packages; the message has pip-audit's output."""


def audit(pins: dict[str, Pin], osv_url: str) -> list[str]:
    """Returns a line for each vulnerability. Raises NoAnswer."""
    return [line for versions in _versions(pins) for line in _audit(versions, osv_url)]


def _audit(versions: dict[str, str], osv_url: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="loadout-audit-") as name:
        pinned, answer = Path(name, "pinned.txt"), Path(name, "answer.json")
        pinned.write_text("\n".join(f"{name}=={version}" for name, version in versions.items()))
        command = [
            *(sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip"),
            *("--vulnerability-service", "osv", "--osv-url", osv_url, "--desc", "off"),
            *("--progress-spinner", "off", "--format", "json", "--output", str(answer)),
            *("--requirement", str(pinned)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not answer.exists():
            raise NoAnswer(f"{osv_url}: {done.stderr.strip().splitlines()[-1]}")
        found: list[dict[str, Any]] = json.loads(answer.read_text())["dependencies"]
    skipped = [each["skip_reason"] for each in found if "skip_reason" in each]
    if skipped or len(found) < len(versions):
        raise NoAnswer("; ".join(skipped) or f"{osv_url} has answered for {len(found)} packages")
    for each in found:
        yield from _lines(each)


def _versions(pins: dict[str, Pin]) -> Iterator[dict[str, str]]:
    """Yields versions by package, twice if a package is allowed in two versions."""
    allowed = {name: re.findall("[=<>]=([^,]+)", pin.specifier) for name, pin in pins.items()}
    yield {name: found[-1] for name, found in allowed.items()}
    if again := {name: found[0] for name, found in allowed.items() if len(found) > 1}:
        yield again


def _lines(package: dict[str, Any]) -> Iterator[str]:
    for each in package["vulns"]:
        fixed = ", ".join(each["fix_versions"]) or "none yet"
        yield f"{package['name']} {package['version']}: {each['id']}, fixed in: {fixed}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.packaging.audit", description=__doc__)
    parser.add_argument("--osv-url", default=OSV_URL, help="URL of a mirror of OSV")
    osv_url: str = parser.parse_args(arguments).osv_url
    pins = read((ROOT / CONSTRAINTS).read_text())
    try:
        found = audit(pins, osv_url)
    except NoAnswer as error:
        print(f"error: not audited, no answer from an advisory service: {error}", file=sys.stderr)
        return 2
    print(*found, f"{len(pins)} packages, {len(found)} known vulnerabilities", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
