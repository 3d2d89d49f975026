# Generated from loadout/_push/async_push.py by `make client`: change that file.
"""A push from its tensors to the replicas that can sample from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from loadout import types
from loadout._push.adapter import any_sharded, check_pairs, read_config, read_tensors
from loadout._push.result import LoadedReplica, Pushed
from loadout._push.sharded import Ranks
from loadout._push.tensors import Tensor
from loadout._push.upload import PushUpload
from loadout._rpc import threads
from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from loadout.errors import InvalidArgument, LoadoutError, NotLoaded, StreamLost
from loadout.retry import ASLEEP, DRAINING

Wait: TypeAlias = Literal["any", "all"] | None
"""Which replicas a push waits for: one, all that are up and serve the base model, or none."""

OTHER_BASE = "base_model"
"""The subject of a replica's refusal of an adapter for another base model."""


@dataclass(frozen=True, slots=True)
class Push:
    """One push by a client.

    Args:
        meta: The adapter to record.
        wait: Which replicas to wait for.
        timeout_s: Deadline in seconds. None: none.
        upload: Sends an upload within a number of seconds.
        load: Has the replica at an address load a name at a revision, within a number of seconds.
        replicas: Returns the known replicas.
    """

    meta: store_pb.UploadMeta
    wait: Wait
    timeout_s: float | None
    upload: Callable[[PushUpload, float | None], Any]
    load: Callable[[str, str, int, float | None], Any]
    replicas: Callable[[], Sequence[types.Replica]]

    def run(self, tensors: Mapping[str, Any], config: Any, group: Any = None) -> Pushed:
        """Sends the tensors, and waits for replicas.

        If tensors are sharded, or with a group, all ranks call this. One sends; all return its
        result or raise its error.

        Args:
            tensors: Tensors of torch or numpy by name.
            config: PEFT's LoraConfig, a mapping, or JSON.
            group: Process group of the ranks. None: all.

        Raises:
            InvalidArgument: A tensor or the config is invalid.
            NotLoaded: A replica cannot load the version.
        """
        found: list[Tensor] = []
        error: Exception | None = None
        settings: dict[str, Any] = {}
        try:
            found = read_tensors(tensors)
            settings = read_config(config)
            check_pairs(found, settings)
        except Exception as raised:  # other ranks have to raise it as well
            error = raised
        if group is None and not any_sharded(tensors):
            if error is not None:
                raise error
            return self._send(PushUpload(self.meta, found, settings))
        ranks = Ranks(group)
        threads.run(ranks.agree, found, error)
        if not ranks.is_first:
            pushed: Pushed = threads.run(ranks.follow, found)
            return pushed
        return self._lead(ranks, PushUpload(self.meta, found, settings, ranks.reader(found)))

    def _lead(self, ranks: Ranks, upload: PushUpload) -> Pushed:
        try:
            pushed = self._send(upload)
        except BaseException as error:
            ranks.end(None, error)
            raise
        threads.run(ranks.end, pushed, None)
        return pushed

    def _send(self, upload: PushUpload) -> Pushed:
        start_s = time.monotonic()
        registration: types.Registration = self.upload(upload, self.timeout_s)
        if self.wait is None:
            return Pushed(registration)
        return self._wait(registration, start_s)

    def _wait(self, registration: types.Registration, start_s: float) -> Pushed:
        """Raises NotLoaded."""
        # Replicas that seem to be down may have been restarted meanwhile, so they are included.
        addresses = [each.address for each in self.replicas()]
        loads = [partial(self._load, each, registration, start_s) for each in addresses]
        skipped: dict[str, str] = {}
        if self.wait == "all":
            outcomes = threads.gather(loads)
        else:
            outcomes = threads.first(loads)
        loaded = [each for each in outcomes if isinstance(each, LoadedReplica)]
        failed = [each for each in outcomes if isinstance(each, NotLoaded)]
        for failure in failed:
            if _is_skipped(failure):
                skipped[failure.subject] = _cause_of(failure).message
        fatal = [each for each in failed if not _is_skipped(each)]
        if fatal and (self.wait == "all" or not loaded):
            raise fatal[0]
        if not loaded:
            reasons = "; ".join(f"{address}: {why}" for address, why in skipped.items())
            raise NotLoaded(
                f"{_recorded(registration)}, but no replica serves it: {reasons}",
                code="UNAVAILABLE",
                reason="NO_REPLICA",
            )
        return Pushed(registration, tuple(loaded), skipped)

    def _load(
        self, address: str, registration: types.Registration, start_s: float
    ) -> LoadedReplica:
        """Raises NotLoaded."""
        left_s = None
        if self.timeout_s is not None:
            left_s = max(0.0, self.timeout_s - (time.monotonic() - start_s))
        name = registration.adapter.name
        try:
            self.load(address, name, registration.revision, left_s)
        except LoadoutError as error:
            raise NotLoaded(
                f"{_recorded(registration)}, but replica {address} cannot load it: {error.message}",
                code=error.code,
                reason=error.reason,
                subject=address,
            ) from error
        return LoadedReplica(address, time.monotonic() - start_s)


def check_wait(wait: object) -> None:
    """Raises InvalidArgument."""
    if wait not in (None, "any", "all"):
        raise InvalidArgument(
            f"wait: must be None, 'any' or 'all', not {wait!r}",
            code="INVALID_ARGUMENT",
            subject="wait",
        )


def _is_skipped(failure: NotLoaded) -> bool:
    """Returns whether the push need not wait for a failed replica: it is down or going down, it
    sleeps, or it serves another base model."""
    cause = _cause_of(failure)
    is_down = isinstance(cause, StreamLost) or cause.reason in (DRAINING, ASLEEP)
    return is_down or cause.subject == OTHER_BASE


def _cause_of(failure: NotLoaded) -> LoadoutError:
    """Returns the replica's error."""
    assert isinstance(failure.__cause__, LoadoutError)
    return failure.__cause__


def _recorded(registration: types.Registration) -> str:
    adapter = registration.adapter
    return f"{adapter.ref} ({adapter.digest}) is recorded"
