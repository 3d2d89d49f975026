"""What is told of the settings, and what of settings and environment must never be told."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote

from sqlalchemy import make_url

from adapter_store.config import StoreSettings

_SECRET_VARIABLE = re.compile(
    r"(?i)(token|secret|passw|credential|api_?key|access_?key|private|headers)"
)
_PATH_VARIABLE = re.compile(r"(?i)(file|dir|path|home)$")
_URL_PASSWORD = re.compile(r"://[^/@\s]*:([^/@\s]+)@")


def shown_settings(settings: StoreSettings) -> dict[str, object]:
    """All settings as they are in force, and the names of those that somebody has set. Of the
    catalog's address host and name are told; files are named, and what is in them is not told."""
    values = settings.model_dump(mode="json")
    values["catalog_dsn"] = _shown_dsn(settings)
    return {"settings": values, "set": sorted(settings.model_fields_set)}


def secrets_of(settings: StoreSettings) -> list[str]:
    """What the catalog's address has of them, and what the environment calls a secret or has in
    URLs."""
    found = environment_secrets()
    if settings.catalog_dsn is not None:
        text = settings.catalog_dsn.get_secret_value()
        url = make_url(text)
        found += [text, str(url.password or ""), *_URL_PASSWORD.findall(text)]
        found += [unquote(str(value)) for value in url.query.values()]
    return found


def environment_secrets() -> list[str]:
    """Values of variables that are named as secrets are, and passwords in URLs."""
    found = []
    for name, value in os.environ.items():
        if _SECRET_VARIABLE.search(name) and not _PATH_VARIABLE.search(name):
            found.append(value)
        found += _URL_PASSWORD.findall(value)
    return found


def _shown_dsn(settings: StoreSettings) -> str | None:
    if settings.catalog_dsn is None:
        return None
    url = make_url(settings.catalog_dsn.get_secret_value())
    return f"{url.drivername}://{url.host or ''}/{url.database or ''}"
