"""Mapped images that a device copies from where they lie.

A device copies beside its computations only from memory that is registered with it. Of a host tier,
that is all. An image that the store shares can be registered where it is mapped: then its way to
the device need not wait for the copy to the host tier, which follows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

from inference_svc.adapters.pulls.image_source import MappedImage

logger = logging.getLogger(__name__)

MIN_BYTES = 4 << 20
"""Smaller images are copied to the host tier in a millisecond: registering takes as long."""
MAX_IMAGES = 16
"""Images that are registered at once: each for a copy or two, which take milliseconds."""
MAX_BYTES = 1 << 30
"""The bytes of these images together, which the system cannot swap out or move meanwhile."""
RETRY_SECONDS = 60.0
"""How long nothing is registered after the device has refused an image, which is copied later than
it could have been."""
LOG_SECONDS = 600.0
"""How often the log has a line of the same result."""
RESULTS = ("registered", "small", "too_many", "too_large", "failed")
"""What becomes of a mapped image. All but the first are copied through the host tier: it is small;
others have all places; it is larger than all may be; the device refuses it, or has just refused
one."""


class HostRegistrar(Protocol):
    """Registers memory with a device. Thread-safe; both calls may take milliseconds."""

    def register(self, data: memoryview) -> None:
        """Lets the device copy from these bytes, which nobody writes to, until `unregister`. Raises
        OSError."""

    def unregister(self, data: memoryview) -> None:
        """Ends it. No copy from the bytes is under way. Raises OSError."""


class RegisteredImage:
    """A mapped image that is registered and mapped as long as anybody holds it: at first its maker.
    `on_release` is called once, when nobody does any more. Thread-safe."""

    def __init__(self, image: MappedImage, on_release: Callable[[RegisteredImage], None]) -> None:
        image.hold()
        self.image = image
        self._on_release = on_release
        self._lock = threading.Lock()
        self._num_holders = 1

    @property
    def data(self) -> memoryview:
        """All bytes of the image."""
        return self.image.data

    def hold(self) -> bool:
        """Adds a holder. Returns False if nobody holds it any more: it cannot be copied from."""
        with self._lock:
            self._num_holders += self._num_holders > 0
            return self._num_holders > 0

    def release(self) -> None:
        """Ends what one holder holds."""
        with self._lock:
            assert self._num_holders > 0, "released more often than held"
            self._num_holders -= 1
            is_last = not self._num_holders
        if is_last:
            self._on_release(self)


class Registrations:
    """The images that are registered with a device: at most so many, of so many bytes together.
    Thread-safe."""

    def __init__(
        self,
        registrar: HostRegistrar,
        *,
        min_bytes: int = MIN_BYTES,
        max_images: int = MAX_IMAGES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._registrar = registrar
        self._min_bytes, self._max_images, self._max_bytes = min_bytes, max_images, max_bytes
        self._lock = threading.Lock()
        self._results = Counter(dict.fromkeys(RESULTS, 0))
        self._num_images = self._num_bytes = 0
        self._failed_s = float("-inf")
        self._logged_s: dict[str, float] = {}
        self._is_closed = False
        # The last holder is often the engine, which must not wait for the device.
        self._releasing = ThreadPoolExecutor(1, thread_name_prefix="loadout-unregister")

    @property
    def num_images(self) -> int:
        return self._num_images

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def results(self) -> dict[str, int]:
        """Returns how many images have had each of `RESULTS`."""
        with self._lock:
            return dict(self._results)

    def admit(self, num_bytes: int) -> bool:
        """Returns whether an image of this size has a place, which `register` then takes. If not,
        the reason is counted, and logged from time to time."""
        reason = self._reserve(num_bytes)
        if reason:
            self._report(reason)
        return not reason

    def register(self, image: MappedImage) -> RegisteredImage | None:
        """Registers an image that was admitted, for its caller, who releases it. None: the device
        refuses it, and none is admitted for a while."""
        try:
            self._registrar.register(image.data)
        except OSError as error:
            self._free(len(image.data))
            self._failed_s = time.monotonic()
            self._report("failed", str(error))
            return None
        except BaseException:
            self._free(len(image.data))
            raise
        self._report("registered")
        return RegisteredImage(image, self._release)

    def close(self) -> None:
        """Waits for what is being released. Further images are released by their last holder."""
        self._is_closed = True
        self._releasing.shutdown()

    def _reserve(self, num_bytes: int) -> str:
        """Takes a place. Returns why there is none, "" if there was."""
        if num_bytes < self._min_bytes:
            return "small"
        if num_bytes > self._max_bytes:
            return "too_large"
        if time.monotonic() < self._failed_s + RETRY_SECONDS:
            return "failed"
        with self._lock:
            has_place = self._num_images < self._max_images
            if not has_place or self._num_bytes + num_bytes > self._max_bytes:
                return "too_many"
            self._num_images += 1
            self._num_bytes += num_bytes
        return ""

    def _free(self, num_bytes: int) -> None:
        with self._lock:
            self._num_images -= 1
            self._num_bytes -= num_bytes

    def _report(self, result: str, why: str = "") -> None:
        with self._lock:
            self._results[result] += 1
            now_s = time.monotonic()
            is_due = now_s >= self._logged_s.get(result, -LOG_SECONDS) + LOG_SECONDS
            if is_due:
                self._logged_s[result] = now_s
        if is_due and result == "registered":
            logger.info("shared image is registered with the device")
        elif is_due:
            level = logging.WARNING if result == "failed" else logging.INFO
            facts = {"reason": result, "why": why}
            logger.log(level, "shared image is copied through the host tier", extra=facts)

    def _release(self, registered: RegisteredImage) -> None:
        if not self._is_closed:
            with suppress(RuntimeError):  # closed meanwhile
                self._releasing.submit(self._unregister, registered)
                return
        self._unregister(registered)

    def _unregister(self, registered: RegisteredImage) -> None:
        num_bytes = len(registered.data)
        try:
            self._registrar.unregister(registered.data)
        except OSError as error:  # the device has failed, which ends the engine elsewhere
            logger.warning("shared image stays registered", extra={"why": str(error)})
        finally:
            registered.image.release()
            self._free(num_bytes)
