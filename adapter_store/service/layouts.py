"""Layouts, and the announcements of their servers: register, list, forget."""

from __future__ import annotations

import dataclasses
import logging
from typing import NamedTuple

from adapter_store.catalog.layouts import Layouts
from adapter_store.catalog.servers import Servers
from adapter_store.core import ANYONE, Announcement, LayoutInfo, Principal
from adapter_store.errors import LimitExceeded
from adapter_store.images.plan import layout as layout_texts
from adapter_store.images.plan.announcement import announcement_id, validate_announcement
from adapter_store.images.plan.plan import IMAGE_FORMATS
from adapter_store.service.calls import Calls
from adapter_store.service.warm_images import StandingImages
from contract.images.layouts import Layout
from servicekit.errors import FailedPrecondition

logger = logging.getLogger(__name__)

UNANNOUNCED = Announcement(is_renewed=False)
"""The announcement of a server that announces nothing beside its layout."""


class AcceptedLayout(NamedTuple):
    """A registered layout: its id, the newest image format common to both sides, and the id of the
    announcement, by which a watch renews it; "" if there were too many."""

    layout_id: str
    image_format: int
    announcement_id: str


class LayoutRegistry:
    def __init__(
        self, calls: Calls, layouts: Layouts, servers: Servers, standing: StandingImages
    ) -> None:
        self._calls = calls
        self._layouts = layouts
        self._servers = servers
        self._standing = standing

    async def register(
        self,
        layout: Layout,
        image_formats: list[int],
        caller: Principal = ANYONE,
        announcement: Announcement = UNANNOUNCED,
    ) -> AcceptedLayout:
        """Records a layout, and a server's announcement beside it. Raises FailedPrecondition
        NO_COMMON_IMAGE_FORMAT, ShareExceeded, InvalidArgument and LimitExceeded."""
        common = set(image_formats) & set(IMAGE_FORMATS)
        if not common:
            raise FailedPrecondition(
                f"layout.image_formats: {sorted(image_formats)} has none of this store's "
                f"{list(IMAGE_FORMATS)}",
                subject="layout.image_formats",
                reason="NO_COMMON_IMAGE_FORMAT",
            )
        layout = dataclasses.replace(layout, image_format=max(common))
        # A large one takes a second of a processor.
        layout_id, announcement_id, is_new = await self._calls.work(
            caller, self._add, layout, announcement, caller.account
        )
        if is_new:
            await self._standing.resume(layout_id)
        return AcceptedLayout(layout_id, layout.image_format, announcement_id)

    async def page(self, caller: Principal, after: str) -> tuple[list[LayoutInfo], str]:
        """See Layouts.page."""
        return await self._calls.read_list(caller, self._layouts.page, after)

    async def forget(self, caller: Principal, layout_id: str) -> int:
        """Forgets a layout; returns the number of its images, which are removed from memory, and
        from the disks of all replicas with their next collections. Raises NotFound."""
        num_images = await self._calls.call(caller, self._layouts.forget, layout_id)
        await self._standing.drop(layout_id)
        return num_images

    def _add(
        self, layout: Layout, announcement: Announcement, account: str
    ) -> tuple[str, str, bool]:
        """Returns the ids of both, and whether images may be missing that were not before."""
        layout_texts.validate(layout)
        validate_announcement(announcement, layout)
        if layout.image_format > 1:
            # No part of the layout: models of equal shapes have one, and are others all the same.
            announcement = dataclasses.replace(announcement, base_model=layout.base_model)
        body = layout_texts.to_text(layout)
        layout_id = layout_texts.text_id(body)
        announced_id = announcement_id(layout_id, announcement)
        was_not_live = self._layouts.add(layout_id, layout.base_model, body, account)
        try:
            is_first = self._servers.announce(layout_id, announced_id, announcement, account)
        except LimitExceeded as error:  # its servers can serve all the same
            logger.warning("a server is not announced", extra={"why": error.message})
            return layout_id, "", was_not_live
        return layout_id, announced_id, was_not_live or is_first
