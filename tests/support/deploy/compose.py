"""The compose files, as they are."""

from __future__ import annotations

from typing import Any

import yaml

from tests.support.deploy.manifests import ROOT

FOLDER = ROOT / "deploy" / "compose"


class Loader(yaml.SafeLoader):
    """Compose's own tags, such as !override, say how files are merged; values are plain."""


Loader.add_constructor("!override", lambda loader, node: loader.construct_sequence(node))


def read(name: str) -> dict[str, Any]:
    return dict(yaml.load((FOLDER / name).read_text(), Loader))


COMPOSE, CUDA = read("compose.yaml"), read("compose.cuda.yaml")
