"""Base models: those that servers have registered, with all their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, and_, select

from adapter_store.catalog.layouts import is_live
from adapter_store.catalog.schema import adapters, layout_bases, layouts, versions
from servicekit.refs import AdapterName


@dataclass(frozen=True, slots=True)
class KnownBaseModels:
    """What is known when an adapter is registered under a name: the base model of its current
    version and how that version's own config names it ("": there is no such version), and all names
    of each base model with a live layout."""

    served: Mapping[str, frozenset[str]]
    current: str = ""
    current_in_config: str = ""


def known(conn: Connection, name: AdapterName, live_since: int) -> KnownBaseModels:
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
    return KnownBaseModels(_served(conn, live_since), *current)


def _served(conn: Connection, live_since: int) -> dict[str, frozenset[str]]:
    query = (
        select(layout_bases)
        .join(layouts, layouts.c.layout_id == layout_bases.c.layout_id)
        .where(is_live(live_since))
        .order_by(layout_bases.c.is_alias, layout_bases.c.base_model)
    )
    base_by_layout: dict[str, str] = {}
    names: dict[str, set[str]] = {}
    for row in conn.execute(query):  # a layout's base model first, then its aliases
        base_model = base_by_layout.setdefault(row.layout_id, row.base_model)
        names.setdefault(base_model, set()).add(row.base_model)
    return {base_model: frozenset(found) for base_model, found in names.items()}
