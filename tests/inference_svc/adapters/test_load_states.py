"""How long a load has waited for the store."""

from __future__ import annotations

from contract.images.header import ImageHeader
from inference_svc.adapters.load_states import SLOW_PULL_BYTES_PER_S, Load, LoadState


def test_large_image_has_more_time_to_arrive() -> None:
    """Neither waiting for memory nor the time that its bytes take is the store's fault."""
    header = ImageHeader("image", "large", "layout", 2, 10 * SLOW_PULL_BYTES_PER_S, ())
    load = Load(0.0, 0.0, LoadState.PULLING, header=header)
    load.wait_for_room(LoadState.NEEDS_PULL_ROOM, 1.0)
    load.on_pull_room(3.0)
    assert (load.store_wait_since_s, load.waited_s) == (12.0, 2.0)
