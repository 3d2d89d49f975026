"""Filters and page tokens of `ListAdapters`, checked before they reach SQL."""

from __future__ import annotations

import base64
import binascii
import json
import re
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import JSON, ColumnElement, Select, cast, func, literal, true, tuple_

from adapter_store.catalog.tables.schema import adapters, versions
from adapter_store.core import Tenants
from servicekit.errors import InvalidArgument
from servicekit.refs import AdapterName

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000
MAX_VERSION = 2**31 - 1
MAX_LABELS = 64
MAX_FILTER_CHARS = 4096
MAX_FILTER_TERMS = 16
"""Each term is work for every adapter that the database looks at."""

_LABEL_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")
_PART = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LABEL_VALUE = re.compile(r"[\x21-\x7e]{0,255}")


@dataclass(frozen=True, slots=True)
class Filter:
    """The terms that an adapter must match, all of those given."""

    tenant: str | None = None
    base_model: str | None = None
    name_prefix: str | None = None
    labels: dict[str, str] = field(default_factory=dict)


def check_labels(labels: dict[str, str]) -> None:
    """Raises InvalidArgument naming the label that could not be filtered by."""
    if len(labels) > MAX_LABELS:
        raise InvalidArgument(f"labels: {len(labels)} are more than {MAX_LABELS}", subject="labels")
    for key, value in labels.items():
        if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            raise InvalidArgument(
                f"labels: {key!r}={value[:80]!r}: a key is of the form "
                "[A-Za-z0-9][A-Za-z0-9._/-]{0,62}, a value up to 255 visible ASCII characters",
                subject="labels",
            )


def parse_filter(text: str) -> Filter:
    """Reads space-separated `tenant=T base_model=B name=PREFIX label.KEY=VALUE`. Raises
    InvalidArgument."""
    if len(text) > MAX_FILTER_CHARS:
        raise InvalidArgument(
            f"filter: {len(text)} characters are more than {MAX_FILTER_CHARS}", subject="filter"
        )
    simple: dict[str, str] = {}
    labels: dict[str, str] = {}
    terms = text.split()
    if len(terms) > MAX_FILTER_TERMS:
        raise InvalidArgument(
            f"filter: {len(terms)} terms are more than {MAX_FILTER_TERMS}", subject="filter"
        )
    for term in terms:
        key, equals, value = term.partition("=")
        into, key = (labels, key[6:]) if key.startswith("label.") else (simple, key)
        known = bool(_LABEL_KEY.fullmatch(key)) if into is labels else key in _SIMPLE_TERMS
        if not equals or not known or not value.isprintable():
            raise InvalidArgument(
                f"filter: {term[:80]!r} is not one of tenant=T, base_model=B, name=PREFIX, "
                "label.KEY=VALUE",
                subject="filter",
            )
        if into.setdefault(key, value) != value:
            raise InvalidArgument(f"filter: {key!r} is given twice", subject="filter")
    return Filter(simple.get("tenant"), simple.get("base_model"), simple.get("name"), labels=labels)


_SIMPLE_TERMS = frozenset({"tenant", "base_model", "name"})


def encode_page_token(last: AdapterName, filter_text: str) -> str:
    return _encode(last.tenant, last.name, filter_text)


def decode_page_token(token: str, filter_text: str) -> AdapterName | None:
    """Returns where the last page ended. Raises InvalidArgument for a token of another list."""
    if not token:
        return None
    tenant, name, filter_of_token = _decode(token, (str, str, str))
    if not _PART.fullmatch(tenant) or not _PART.fullmatch(name):
        raise _not_a_token()
    if filter_of_token != filter_text:
        raise InvalidArgument(
            "page_token: belongs to a list with another filter", subject="page_token"
        )
    return AdapterName(tenant, name)


def encode_version_token(name: AdapterName, last_version: int) -> str:
    return _encode(str(name), last_version)


def decode_version_token(token: str, name: AdapterName) -> int | None:
    """Returns the version that the last page ended with. Raises InvalidArgument for a token of
    another list."""
    if not token:
        return None
    name_of_token, version = _decode(token, (str, int))
    if name_of_token != str(name):
        raise InvalidArgument("page_token: belongs to another list", subject="page_token")
    if not 0 <= version <= MAX_VERSION:
        raise _not_a_token()
    return int(version)


def _encode(*values: str | int) -> str:
    body = json.dumps(values, separators=(",", ":"))
    return base64.urlsafe_b64encode(body.encode()).decode().rstrip("=")


def _decode(token: str, types: tuple[type, ...]) -> list[Any]:
    try:
        padded = token + "=" * (-len(token) % 4)
        values = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
        if [type(value) for value in values] == list(types):
            return list(values)
    except (binascii.Error, ValueError, TypeError, RecursionError):
        pass
    raise _not_a_token()


def _not_a_token() -> InvalidArgument:
    return InvalidArgument("page_token: not a token of this store", subject="page_token")


def page_limit(page_size: int) -> int:
    """Returns the number of rows of a page: the requested one, within the contract's default and
    maximum."""
    return min(page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)


def apply_filter(
    query: Select[tuple[object, ...]], terms: Filter, after: AdapterName | None, dialect: str
) -> Select[tuple[object, ...]]:
    """Narrows a query over adapters joined with their current versions, in keyset order."""
    if after is not None:
        query = query.where(
            tuple_(adapters.c.tenant, adapters.c.name)
            > tuple_(literal(after.tenant), literal(after.name))
        )
    if terms.tenant is not None:
        query = query.where(adapters.c.tenant == terms.tenant)
    if terms.base_model is not None:
        query = query.where(versions.c.base_model == terms.base_model)
    if terms.name_prefix:
        query = query.where(*_prefix(terms.name_prefix))
    for key, value in terms.labels.items():
        query = query.where(_label(key, dialect) == value)
    return query.order_by(adapters.c.tenant, adapters.c.name)


def within(tenants: Tenants) -> ColumnElement[bool]:
    """Returns a condition that holds for the adapters of these tenants."""
    return true() if tenants is None else adapters.c.tenant.in_(sorted(tenants))


def _label(key: str, dialect: str) -> ColumnElement[str]:
    """Returns the label's value. Keys are checked: they hold no character that is special in a
    path."""
    if dialect == "postgresql":
        return func.json_extract_path_text(cast(versions.c.labels, JSON), key)
    return func.json_extract(versions.c.labels, f'$."{key}"')


def _prefix(prefix: str) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    """Returns bounds for names that start with `prefix`. Names are ASCII."""
    return adapters.c.name >= prefix, adapters.c.name < prefix + "\U0010ffff"
