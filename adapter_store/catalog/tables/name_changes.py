"""Changes the content of names. Every function needs a write transaction."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row

from adapter_store.catalog.tables import version_rows as rows
from adapter_store.catalog.tables.lookup import to_micros
from adapter_store.catalog.tables.version_rows import NewVersion
from adapter_store.core import AdapterEvent, AdapterRecord, EventKind, Pruned, Tenants
from adapter_store.errors import Conflict
from servicekit.errors import FailedPrecondition, NotFound
from servicekit.refs import AdapterName, AdapterRef

MAX_PRUNED = 1000
"""Versions that one transaction deletes: every other writer waits for it."""


class Registered(NamedTuple):
    """The change of a registration, and the revision at which its content is current."""

    events: list[AdapterEvent]
    revision: int
    deleted_versions: list[int]


def register(
    conn: Connection, new: NewVersion, if_current_digest: str, time: datetime, keep: int = 0
) -> Registered:
    """Points the name to this content.

    Content is a digest for a base model, with a tokenizer's digest and a chat template's, and a
    version's content never changes. The pin moves with the name. For content that is recorded
    already, given labels, description and signature replace the version's. With `keep` the versions
    beyond the newest so many are deleted, at most MAX_PRUNED, but neither this one nor pinned ones.
    Raises Conflict if the name does not point to `if_current_digest`, and FailedPrecondition for an
    ephemeral version that would take the pin of another, because pinned content is to stay.
    """
    adapter = rows.find_adapter(conn, new.name)
    current = rows.find_version(conn, adapter.id, adapter.current_version) if adapter else None
    _check_current(new.name, current, if_current_digest)
    _check_pin(new, current)
    rows.put_blob(conn, new, time)
    rows.put_texts(conn, new)
    if adapter is None:
        adapter = rows.add_adapter(conn, new.name, time)
    if current is not None and _is_of(current, new):
        version = current.version
        _prolong(conn, current, new, time)
        made = _register_again(conn, adapter, current, new, time)
    else:
        version = _put_version(conn, adapter, new, time)
        made = [_repoint(conn, adapter, current, version, new.digest, new.pinned, time)]
    deleted = _delete_superseded(conn, adapter.id, version, keep, time) if keep else []
    if deleted and not made:
        made = [rows.point(conn, adapter, version, new.digest, EventKind.UPDATED, time)]
    return Registered(made, made[-1].revision if made else adapter.revision, deleted)


def prune(
    conn: Connection, name: AdapterName, keep: int, time: datetime, tenants: Tenants = None
) -> tuple[Pruned, list[AdapterEvent]]:
    """Deletes the live versions beyond the newest `keep`, but neither the current one nor pinned
    ones; at most MAX_PRUNED, the oldest first. Raises NotFound, also for a name of another
    tenant."""
    adapter = rows.find_adapter(conn, name, tenants)
    if adapter is None or not adapter.current_version:
        raise NotFound(f"no adapter {name}", subject=str(name))
    current = rows.find_version(conn, adapter.id, adapter.current_version)
    assert current is not None
    deleted = _delete_superseded(conn, adapter.id, current.version, keep, time)
    if not deleted:
        return Pruned((), adapter.revision, has_more=False), []
    event = rows.point(conn, adapter, current.version, current.digest, EventKind.UPDATED, time)
    return Pruned(tuple(deleted), event.revision, len(deleted) == MAX_PRUNED), [event]


def rollback(
    conn: Connection,
    name: AdapterName,
    version: int,
    if_current_digest: str,
    deleted_after: datetime,
    time: datetime,
    tenants: Tenants = None,
) -> tuple[list[AdapterEvent], int]:
    """Points the name to one of its versions, as `register` with that version's content would.

    A version deleted after `deleted_after` is restored. It has no time to live any more: that may
    have ended. Raises NotFound, also for a name of another tenant, and Conflict.
    """
    adapter = rows.find_adapter(conn, name, tenants)
    target = rows.find_version(conn, adapter.id, version) if adapter else None
    if adapter is None or target is None or _is_expired(target, deleted_after):
        what = str(AdapterRef(name, version))
        raise NotFound(f"no adapter {what}", subject=what)
    current = rows.find_version(conn, adapter.id, adapter.current_version)
    _check_current(name, current, if_current_digest)
    if current is not None and current.version == version:
        return [], adapter.revision
    rows.change(conn, adapter.id, version, delete_time=None, expire_time=None)
    event = _repoint(conn, adapter, current, version, target.digest, target.pinned, time)
    return [event], event.revision


def remove(
    conn: Connection, name: AdapterName, version: int, time: datetime, tenants: Tenants = None
) -> tuple[str, AdapterEvent]:
    """Deletes a version, or with 0 the name; returns the digest that the version, or the name, had.

    A name that loses its current version points to its newest remaining one. Raises NotFound, also
    for a name of another tenant.
    """
    adapter = rows.find_adapter(conn, name, tenants)
    live = rows.live_versions(conn, adapter.id) if adapter else {}
    if adapter is None or not live or (version and version not in live):
        what = str(AdapterRef(name, version or None))
        raise NotFound(f"no adapter {what}", subject=what)
    gone = live[version or adapter.current_version]
    return gone, _delete(conn, adapter, live, [version] if version else list(live), time)


def expire(conn: Connection, time: datetime) -> list[AdapterEvent]:
    """Deletes, as `remove`, live versions whose time to live has ended and that are not pinned; at
    most MAX_PRUNED."""
    return _delete_all(conn, rows.expired_versions(conn, time, MAX_PRUNED), time)


def forget_memory(conn: Connection, time: datetime) -> list[AdapterEvent]:
    """Removes the versions whose content was in the memory of a process that has ended, and all
    that is known of that."""
    events = _delete_all(conn, rows.versions_in_memory(conn), time)
    rows.forget_memory(conn)
    return events


def _delete_all(
    conn: Connection, numbers: Mapping[int, Collection[int]], time: datetime
) -> list[AdapterEvent]:
    """Deletes live versions of names, whose ids are the keys."""
    events = []
    for adapter_id, deleted in numbers.items():
        live = rows.live_versions(conn, adapter_id)
        adapter = rows.get_adapter(conn, adapter_id)
        events.append(_delete(conn, adapter, live, deleted, time))
    return events


def _delete(
    conn: Connection,
    adapter: Row[Any],
    live: Mapping[int, str],
    deleted: Collection[int],
    time: datetime,
) -> AdapterEvent:
    """Deletes some of the name's live versions; it points to its newest remaining one if its
    current one is among them."""
    for number in deleted:
        rows.change(conn, adapter.id, number, pinned=False, delete_time=to_micros(time))
    remaining = {number: digest for number, digest in live.items() if number not in deleted}
    if not remaining:
        last = live[adapter.current_version]
        return rows.point(conn, adapter, 0, last, EventKind.DELETED, time)
    current = adapter.current_version if adapter.current_version in remaining else max(remaining)
    return rows.point(conn, adapter, current, remaining[current], EventKind.UPDATED, time)


def set_pinned(
    conn: Connection, record: AdapterRecord, pinned: bool, time: datetime
) -> AdapterEvent | None:
    """Pins or unpins one version. Returns None if nothing changes."""
    if record.pinned == pinned:
        return None
    adapter = rows.find_adapter(conn, record.name)
    assert adapter is not None
    rows.change(conn, adapter.id, record.version, pinned=pinned)
    current = rows.find_version(conn, adapter.id, adapter.current_version)
    assert current is not None
    kind = EventKind.PINNED if pinned else EventKind.UNPINNED
    return rows.point(conn, adapter, current.version, current.digest, kind, time)


def _put_version(conn: Connection, adapter: Row[Any], new: NewVersion, time: datetime) -> int:
    """Returns the version of this content, which is added if there is none."""
    known = rows.same_content(conn, adapter.id, new)
    if known is not None:
        _update_description(conn, known, new)
        _prolong(conn, known, new, time)
        return int(known.version)
    version = int(adapter.last_version) + 1
    rows.add_version(conn, adapter.id, version, new, time)
    return version


def _delete_superseded(
    conn: Connection, adapter_id: int, current_version: int, keep: int, time: datetime
) -> list[int]:
    found = rows.superseded_versions(conn, adapter_id, current_version, keep, MAX_PRUNED)
    if found:
        rows.delete_versions(conn, adapter_id, found, time)
    return found


def _register_again(
    conn: Connection, adapter: Row[Any], current: Row[Any], new: NewVersion, time: datetime
) -> list[AdapterEvent]:
    """Registers the content that the name points to already: only its description and its pin can
    change."""
    changes: list[EventKind] = []
    if _update_description(conn, current, new):
        changes.append(EventKind.UPDATED)
    if new.pinned and not current.pinned:
        rows.change(conn, adapter.id, current.version, pinned=True)
        changes.append(EventKind.PINNED)
    return [rows.point(conn, adapter, current.version, new.digest, kind, time) for kind in changes]


def _update_description(conn: Connection, known: Row[Any], new: NewVersion) -> bool:
    """Replaces the given fields that differ. Returns whether anything did."""
    given = {
        "labels": rows.dump_labels(new.labels) if new.labels else "",
        "description": new.description,
        "signed_by": new.signed_by,
        "signature": new.signature if new.signed_by else b"",
    }
    changes = {key: value for key, value in given.items() if value and value != known._mapping[key]}
    if changes:
        rows.change(conn, known.adapter_id, known.version, **changes)
    return bool(changes)


def _prolong(conn: Connection, known: Row[Any], new: NewVersion, time: datetime) -> None:
    """Lets a version live as long as the longer-lived of its registrations."""
    expire_time = rows.expire_micros(new, time)
    if known.expire_time is None or expire_time is None:
        expire_time = None
    else:
        expire_time = max(expire_time, known.expire_time)
    ephemeral = known.ephemeral and new.ephemeral
    if (expire_time, ephemeral) != (known.expire_time, known.ephemeral):
        rows.change(
            conn, known.adapter_id, known.version, expire_time=expire_time, ephemeral=ephemeral
        )


def _repoint(
    conn: Connection,
    adapter: Row[Any],
    current: Row[Any] | None,
    version: int,
    digest: str,
    pinned: bool,
    time: datetime,
) -> AdapterEvent:
    """Points the name to another version, and moves the pin to it."""
    if current is not None:
        rows.change(conn, adapter.id, current.version, pinned=False)
    if pinned or (current is not None and current.pinned):
        rows.change(conn, adapter.id, version, pinned=True)
    kind = EventKind.REGISTERED if current is None else EventKind.UPDATED
    return rows.point(conn, adapter, version, digest, kind, time)


def _is_of(current: Row[Any], new: NewVersion) -> bool:
    names = ("digest", "base_model", "tokenizer_digest", "chat_template_digest")
    is_same = all(current._mapping[name] == getattr(new, name) for name in names)
    return is_same and json.loads(current.class_labels) == list(new.class_labels)


def _is_expired(version: Row[Any], deleted_after: datetime) -> bool:
    """Returns whether the version is deleted and its grace has ended."""
    return version.delete_time is not None and version.delete_time <= to_micros(deleted_after)


def _check_pin(new: NewVersion, current: Row[Any] | None) -> None:
    if not new.ephemeral or current is None or not current.pinned or _is_of(current, new):
        return
    pinned = AdapterRef(new.name, current.version)
    raise FailedPrecondition(
        f"ephemeral: {pinned} is pinned, and the pin moves with the name, to content that is "
        f"lost when the store ends: unpin {pinned} first, push under another name, or without "
        "ephemeral",
        subject="ephemeral",
        reason="NAME_PINNED",
    )


def _check_current(name: AdapterName, current: Row[Any] | None, required: str) -> None:
    if required and (current is None or current.digest != required):
        points_to = current.digest if current else "nothing"
        raise Conflict(
            f"if_current_digest: {name} points to {points_to}, not to {required}",
            subject="if_current_digest",
        )
