"""The use of tenants, against their quotas, and the totals.

Quotas are checked within the transaction that records, so they hold for all concurrent
transactions, also in other replicas. Sums cover the tenant's own rows only, and only if there is a
quota.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sqlalchemy import CompoundSelect, Connection, func, select, union

from adapter_store.catalog.tables import events, layouts
from adapter_store.catalog.tables.schema import adapters, blobs, versions
from adapter_store.catalog.tables.schema import texts as text_rows
from adapter_store.core import Quota
from servicekit.errors import QuotaExceeded
from servicekit.refs import AdapterName

MAX_NAMES = 1_000_000
"""Names of a tenant, deleted ones included: their rows stay, so that no version number comes twice,
and would fill the catalog."""


@dataclass(frozen=True, slots=True)
class CatalogCounts:
    """The totals of the catalog. `layouts` counts the live ones."""

    revision: int
    adapters: int
    layouts: int
    blob_bytes: int


def counts(conn: Connection, live_since: int) -> CatalogCounts:
    is_live = adapters.c.current_version > 0
    return CatalogCounts(
        revision=events.revision(conn),
        adapters=conn.scalar(select(func.count()).select_from(adapters).where(is_live)) or 0,
        layouts=len(layouts.live(conn, live_since)),
        blob_bytes=int(conn.scalar(select(func.sum(blobs.c.source_bytes))) or 0),
    )


def check_quota(
    conn: Connection,
    name: AdapterName,
    digest: str,
    source_bytes: int,
    quota: Quota,
    texts: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Raises QuotaExceeded if recording this content, `texts` by digest included, under the name
    would go over the quota.

    Content that adds nothing passes, also above a quota that has been lowered.
    """
    if quota.max_adapters is not None and not _is_live(conn, name):
        check_num_adapters(conn, name.tenant, 1, quota)
    if quota.max_bytes is None:
        return
    new_bytes = 0 if _has_digest(conn, name.tenant, digest) else source_bytes
    known = set(conn.scalars(_texts_of(name.tenant))) if texts else set()
    new_bytes += sum(len(content) for each, content in texts.items() if each not in known)
    stored_bytes = _stored_bytes(conn, name.tenant) if new_bytes else 0
    if new_bytes and stored_bytes + new_bytes > quota.max_bytes:
        raise _too_many_bytes(name.tenant, stored_bytes, f"{new_bytes} more are over", quota)


def check_capacity(conn: Connection, name: AdapterName, expected_digest: str, quota: Quota) -> None:
    """Raises QuotaExceeded if nothing could be recorded under the name, before its content is
    known. Content that is stored already, and that `expected_digest` names, always fits."""
    _check_num_names(conn, name)
    if quota.max_adapters is not None and not _is_live(conn, name):
        check_num_adapters(conn, name.tenant, 1, quota)
    if quota.max_bytes is not None and not _has_digest(conn, name.tenant, expected_digest):
        stored_bytes = _stored_bytes(conn, name.tenant)
        if stored_bytes >= quota.max_bytes:
            what = "only content that it stores already, named by expected_digest, fits"
            raise _too_many_bytes(name.tenant, stored_bytes, what, quota)


def check_num_adapters(conn: Connection, tenant: str, num_more: int, quota: Quota) -> None:
    """Raises QuotaExceeded if the tenant has more adapters than its quota, or would with
    `num_more`."""
    if quota.max_adapters is None:
        return
    query = select(func.count()).where(adapters.c.tenant == tenant, adapters.c.current_version > 0)
    num_adapters = (conn.scalar(query) or 0) + num_more
    if num_adapters > quota.max_adapters:
        raise QuotaExceeded(
            f"max_adapters: tenant {tenant!r} would have {num_adapters} adapters, "
            f"its quota is {quota.max_adapters}",
            subject="max_adapters",
        )


def _check_num_names(conn: Connection, name: AdapterName) -> None:
    """Raises QuotaExceeded for a new name of a tenant that has had too many."""
    of_tenant = select(adapters.c.id).where(adapters.c.tenant == name.tenant)
    if conn.execute(of_tenant.where(adapters.c.name == name.name)).first() is not None:
        return
    found = conn.scalar(select(func.count()).select_from(of_tenant.limit(MAX_NAMES).subquery()))
    if (found or 0) >= MAX_NAMES:
        raise QuotaExceeded(
            f"name: tenant {name.tenant!r} has used all of its {MAX_NAMES} names, and deleted "
            "names count: register under a name that it has used before",
            subject="name",
        )


def _too_many_bytes(tenant: str, stored_bytes: int, what: str, quota: Quota) -> QuotaExceeded:
    return QuotaExceeded(
        f"max_bytes: tenant {tenant!r} stores {stored_bytes} bytes of adapters, including deleted "
        f"ones until their grace ends; {what} its quota of {quota.max_bytes}",
        subject="max_bytes",
    )


def _is_live(conn: Connection, name: AdapterName) -> bool:
    query = select(adapters.c.id).where(
        adapters.c.tenant == name.tenant,
        adapters.c.name == name.name,
        adapters.c.current_version > 0,
    )
    return conn.execute(query).first() is not None


def _has_digest(conn: Connection, tenant: str, digest: str) -> bool:
    query = (
        select(versions.c.version)
        .join(adapters, adapters.c.id == versions.c.adapter_id)
        .where(versions.c.digest == digest, adapters.c.tenant == tenant)
    )
    return conn.execute(query.limit(1)).first() is not None


def _stored_bytes(conn: Connection, tenant: str) -> int:
    stored = (
        select(versions.c.digest)
        .join(adapters, adapters.c.id == versions.c.adapter_id)
        .where(adapters.c.tenant == tenant)
    )
    used = conn.scalar(select(func.sum(blobs.c.source_bytes)).where(blobs.c.digest.in_(stored)))
    text_sizes = select(func.sum(text_rows.c.size_bytes)).where(
        text_rows.c.digest.in_(_texts_of(tenant))
    )
    # PostgreSQL sums into a decimal number.
    return int(used or 0) + int(conn.scalar(text_sizes) or 0)


def _texts_of(tenant: str) -> CompoundSelect[Any]:
    """Selects the digests of a tenant's tokenizers and chat templates, "" among them."""
    of_tenant = adapters.c.tenant == tenant
    columns = (versions.c.tokenizer_digest, versions.c.chat_template_digest)
    return union(
        *(
            select(column).join(adapters, adapters.c.id == versions.c.adapter_id).where(of_tenant)
            for column in columns
        )
    )
