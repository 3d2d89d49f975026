"""What is told of the settings, and what of settings and environment must never be told."""

from __future__ import annotations

import contextlib
import os
import re

from inference_svc.config import InferenceSettings

_SECRET_VARIABLE = re.compile(
    r"(?i)(token|secret|passw|credential|api_?key|access_?key|private|headers)"
)
_PATH_VARIABLE = re.compile(r"(?i)(file|dir|path|home)$")
_URL_PASSWORD = re.compile(r"://[^/@\s]*:([^/@\s]+)@")


def shown_settings(config: InferenceSettings) -> dict[str, object]:
    """All settings as they are in force, and the names of those that somebody has set. Files are
    named, and what is in them is not told."""
    return {"settings": config.model_dump(mode="json"), "set": sorted(config.model_fields_set)}


def secrets_of(config: InferenceSettings) -> list[str]:
    """The token for the store, and what the environment calls a secret or has in URLs."""
    found = environment_secrets()
    if config.store_token_file is not None:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            found.append(config.store_token_file.read_text().strip())
    return found


def environment_secrets() -> list[str]:
    """Values of variables that are named as secrets are, and passwords in URLs."""
    found = []
    for name, value in os.environ.items():
        if _SECRET_VARIABLE.search(name) and not _PATH_VARIABLE.search(name):
            found.append(value)
        found += _URL_PASSWORD.findall(value)
    return found
