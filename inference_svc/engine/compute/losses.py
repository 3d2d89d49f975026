"""Requests that end because their rows cannot be computed: the reasons, and the errors for callers
and operators."""

from __future__ import annotations

import enum
import logging
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from inference_svc.core import AdapterKey, Request, Sequence, Sum, digests_of
from inference_svc.errors import NotFinite, OutOfDeviceMemory
from servicekit.errors import Internal, ServiceError

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""When a request may be tried again that the device had no memory for: others may have left."""


class Loss(enum.Enum):
    """Why a row is lost: the device has no memory for one of its tokens, the model's values are not
    finite, or computing it raises an error together with any other rows."""

    MEMORY = "memory"
    NOT_FINITE = "not finite"
    FAULT = "fault"


MAX_MARKED = 1_024
"""The adapters whose losses are remembered, the last ones."""

QUIET_S = 10.0
"""The log has one warning about an adapter in so many seconds, with the number of requests."""


@dataclass(slots=True)
class _Warned:
    """When the log last had a warning about an adapter, and how many requests ended since."""

    at_s: float
    num_since: int = 0


@dataclass
class Losses:
    """`counts` only grow. `dtype` is the model's. `num_refused` counts adapters that were refused
    because their magnitudes could not be divided."""

    dtype: str
    counts: Counter[Loss] = field(default_factory=Counter)
    num_refused: int = 0
    _not_finite: OrderedDict[str, int] = field(default_factory=OrderedDict)
    _warned: OrderedDict[AdapterKey, _Warned] = field(default_factory=OrderedDict)

    def add(self, sequence: Sequence, loss: Loss) -> ServiceError:
        """Counts a sequence that ends, and marks its adapters if its values were not finite;
        returns the error that it ends with."""
        request = sequence.request
        self.counts[loss] += 1
        if loss is Loss.NOT_FINITE:
            for digest in digests_of(request.key):
                self._mark(digest)
        error = self._error(request, loss)
        self._warn(request, error)
        return error

    def add_refused(self, digest: str) -> None:
        """Counts and marks an adapter whose magnitudes cannot be divided."""
        self.num_refused += 1
        self._mark(digest)
        logger.warning("an adapter's magnitudes cannot be applied", extra={"digest": digest})

    def num_not_finite(self, digest: str) -> int:
        """Returns how often values with this adapter were not finite: requests that ended, alone
        or with others in a sum, and loads that were refused. Evicting it does not reset this."""
        return self._not_finite.get(digest, 0)

    def _mark(self, digest: str) -> None:
        self._not_finite[digest] = self._not_finite.pop(digest, 0) + 1
        if len(self._not_finite) > MAX_MARKED:
            self._not_finite.popitem(last=False)

    def _warn(self, request: Request, error: ServiceError) -> None:
        """Logs the first request that ends with an adapter, then a count every QUIET_S."""
        now_s = time.monotonic()
        warned = self._warned.pop(request.key, None)
        if warned is not None and now_s < warned.at_s + QUIET_S:
            warned.num_since += 1
            self._warned[request.key] = warned
            return
        self._warned[request.key] = _Warned(now_s)
        if len(self._warned) > MAX_MARKED:
            self._warned.popitem(last=False)
        num_others = 0 if warned is None else warned.num_since
        logger.warning(
            "a request ends: %s",
            error.message,
            extra={
                "request_id": request.request_id,
                "adapter": request.adapter,
                "num_others": num_others,
            },
        )

    def _error(self, request: Request, loss: Loss) -> ServiceError:
        if loss is Loss.MEMORY:
            return OutOfDeviceMemory(
                "the device has too little memory for one token of the request: the server needs a "
                "smaller --kv-memory or --adapter-memory",
                subject="device",
                retry_after_s=RETRY_S,
            )
        if loss is Loss.NOT_FINITE:
            subject = "adapter" if request.key else "model"
            return NotFinite(_why_not_finite(request, self.dtype), subject=subject)
        name = request.adapter or request.key
        user = f"with adapter {name} " if name else ""
        return Internal(
            f"computing the request {user}failed, also alone in a step: the server's log has the "
            "error"
        )


def _why_not_finite(request: Request, dtype: str) -> str:
    if not request.key:
        return (
            f"the model's values for this prompt are not finite in {dtype}: they overflow, which "
            "--dtype bfloat16 or float32 may prevent"
        )
    name = request.adapter or request.key
    if isinstance(request.key, Sum):
        return (
            f"the model's values with the sum of {name} are not finite in {dtype}: they overflow; "
            "use smaller scales"
        )
    return (
        f"the model's values with adapter {name} are not finite in {dtype}: its weights are too "
        "large, as after a training run that diverged; register a sound version"
    )
