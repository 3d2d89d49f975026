"""The page docs/kubernetes.md, and the objects that it lists."""

from __future__ import annotations

import re

from tests.support.deploy.manifests import ROOT

DOCS = (ROOT / "docs" / "kubernetes.md").read_text()
DOCUMENTED = set(re.findall(r"^\| `([a-z0-9-]+)` \| (?:Secret|PersistentVolumeClaim)", DOCS, re.M))
"""What the overlays expect to be there: the first column of the page's table."""
