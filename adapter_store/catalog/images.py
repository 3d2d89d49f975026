"""The states of images: the verdicts on adapters under layouts."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy import insert, select, update

from adapter_store.catalog.database import Database
from adapter_store.catalog.tables import image_states, schema
from adapter_store.catalog.tables.image_states import ImageAccess
from adapter_store.catalog.times import Times
from adapter_store.core import ImageContent, ImageKey, LayoutVerdict, Tenants


class ImageStates:
    def __init__(self, database: Database, times: Times) -> None:
        self._database = database
        self._times = times

    def set_verdict(self, digest: str, verdict: LayoutVerdict) -> bool:
        with self._database.write() as conn:
            return image_states.set_verdict(conn, digest, verdict, self._times.now())

    def set_fits(self, key: ImageKey, build_micros: int, content: ImageContent) -> None:
        """See image_states.set_fits."""
        with self._database.write() as conn:
            image_states.set_fits(conn, key, build_micros, content, self._times.now())

    def unfinished(self, layout_id: str, after_digest: str, limit: int) -> list[str]:
        """Returns the digests to precompile under this layout, in order, after `after_digest`."""
        with self._database.read() as conn:
            return image_states.unfinished(conn, layout_id, after_digest, limit)

    def pinned_keys(self) -> list[ImageKey]:
        """Returns every image of every pinned version, for live layouts."""
        with self._database.read() as conn:
            return image_states.pinned_keys(conn, self._times.live_since())

    def access(self, key: ImageKey, grace: timedelta, tenants: Tenants = None) -> ImageAccess:
        """Returns the facts that decide whether these tenants may pull an image, from one
        snapshot."""
        now = self._times.now()
        with self._database.read() as conn:
            return image_states.image_access(conn, key, now - grace, tenants, now)

    def adopt_compiler(self, compiler: str) -> bool:
        """Forgets every verdict that another compiler gave. Returns whether there was another."""
        key = schema.meta.c.key == "compiler"
        with self._database.write() as conn:
            if conn.scalar(select(schema.meta.c.value).where(key)) == compiler:
                return False
            image_states.forget_all(conn)
            if conn.execute(update(schema.meta).where(key).values(value=compiler)).rowcount == 0:
                conn.execute(insert(schema.meta).values(key="compiler", value=compiler))
            return True
