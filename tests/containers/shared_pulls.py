"""How images crossed from a store to a server of the same machine."""

from __future__ import annotations

import re
import urllib.request
from collections import Counter

_SAMPLE = re.compile(r'^\w+_shared_pulls_total\{result="(\w+)"\} (\S+)$', re.MULTILINE)


def pulls_by_way(page: str) -> Counter[str]:
    """Returns the pulls of a service since its start, by the `result` of its metric. `page` is the
    address of its metrics."""
    with urllib.request.urlopen(f"http://{page}/metrics", timeout=30) as response:
        text = response.read().decode()
    return Counter({result: int(float(count)) for result, count in _SAMPLE.findall(text)})
