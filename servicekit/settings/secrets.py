"""The environment's secrets, which nothing may print."""

from __future__ import annotations

import os
import re

_SECRET_VARIABLE = re.compile(
    r"(?i)(token|secret|passw|credential|api_?key|access_?key|private|headers)"
)
_PATH_VARIABLE = re.compile(r"(?i)(file|dir|path|home)$")
URL_PASSWORD = re.compile(r"://[^/@\s]*:([^/@\s]+)@")


def environment_secrets() -> list[str]:
    """Returns the values of variables that are named like secrets, and passwords in URLs."""
    found = []
    for name, value in os.environ.items():
        if _SECRET_VARIABLE.search(name) and not _PATH_VARIABLE.search(name):
            found.append(value)
        found += URL_PASSWORD.findall(value)
    return found
