"""Base models: the ones that servers have registered, with all their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Connection, and_, select

from adapter_store.catalog.tables.announcements import lasts
from adapter_store.catalog.tables.layouts import is_live
from adapter_store.catalog.tables.lookup import names_of
from adapter_store.catalog.tables.schema import (
    adapters,
    announcements,
    layout_bases,
    layouts,
    versions,
)
from servicekit.refs import AdapterName


@dataclass(frozen=True, slots=True)
class KnownBaseModels:
    """Known facts when an adapter is registered under a name: the base model of its current version
    and how that version's own config names it ("": there is no such version), all names of each
    base model with a live layout, and which of these have no server now."""

    served: Mapping[str, frozenset[str]]
    current: str = ""
    current_in_config: str = ""
    gone: frozenset[str] = frozenset()


def known(conn: Connection, name: AdapterName, live_since: int, time: datetime) -> KnownBaseModels:
    query = (
        select(versions.c.base_model, versions.c.config_base_model)
        .join(
            adapters,
            and_(
                adapters.c.id == versions.c.adapter_id,
                adapters.c.current_version == versions.c.version,
            ),
        )
        .where(adapters.c.tenant == name.tenant, adapters.c.name == name.name)
    )
    row = conn.execute(query).first()
    current = ("", "") if row is None else (row.base_model, row.config_base_model)
    served, gone = _served(conn, live_since, time)
    return KnownBaseModels(served, current[0], current[1], gone)


def _served(
    conn: Connection, live_since: int, time: datetime
) -> tuple[dict[str, frozenset[str]], frozenset[str]]:
    of_layouts = (
        select(layout_bases)
        .join(layouts, layouts.c.layout_id == layout_bases.c.layout_id)
        .where(is_live(live_since))
        .order_by(layout_bases.c.is_alias, layout_bases.c.base_model)
    )
    announced = (
        select(announcements, lasts(time).label("lasts"))
        .join(layouts, layouts.c.layout_id == announcements.c.layout_id)
        .where(is_live(live_since))
    )
    found = [(row, names_of(row)) for row in conn.execute(announced)]
    # Names that earlier releases have recorded are the layout's.
    claimed = {(row.layout_id, name) for row, own in found if row.base_model for name in own}
    base_by_layout: dict[str, str] = {}
    names: dict[str, set[str]] = {}
    for row in conn.execute(of_layouts):  # a layout's base model first, then its further names
        base_model = base_by_layout.setdefault(row.layout_id, row.base_model)
        if not row.is_alias or (row.layout_id, row.base_model) not in claimed:
            names.setdefault(base_model, set()).add(row.base_model)
    with_server: set[str] = set()
    for row, own in found:
        base_model = row.base_model or base_by_layout[row.layout_id]
        names.setdefault(base_model, {base_model}).update(own)
        if row.lasts:
            with_server.add(base_model)
    served = {base_model: frozenset(names[base_model]) for base_model in sorted(names)}
    return served, frozenset(served.keys() - with_server)
