"""The versions that images are built with."""

from __future__ import annotations

from tests.support.deploy.manifests import ROOT

FOLDER = ROOT / "deploy" / "images"


def versions() -> dict[str, str]:
    lines = (FOLDER / "versions.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
