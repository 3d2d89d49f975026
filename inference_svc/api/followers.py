"""Requests that follow their adapter's name, and are told of each newer version as the watch is."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from inference_svc.api.generate_call import GenerateCall
from inference_svc.core import Principal, Request, VersionPolicy
from inference_svc.errors import StoreUnavailable
from inference_svc.frontend.async_engine import AsyncEngine
from inference_svc.store.adapter_resolver import Binding, Directory
from servicekit.errors import InvalidArgument, ServiceError
from servicekit.refs import parse_ref

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""How long to wait for a store that does not answer."""


@dataclass(eq=False, slots=True)
class _Follower:
    """A running request. `binding` is the version that it has moved to last; `task` looks up its
    name's version at `revision`."""

    principal: Principal
    ref: str
    binding: Binding
    request: Request
    revision: int = 0
    task: asyncio.Task[None] | None = None


class Followers:
    """The running requests that follow a name. Everything runs on one event loop.

    A name is resolved on behalf of each caller, so that none moves to a version that it may not
    use. A request stays on its version if the name is deleted, or points to a version that this
    server cannot serve, or one with another tokenizer.
    """

    def __init__(self, directory: Directory, engine: AsyncEngine) -> None:
        self._directory = directory
        self._engine = engine
        self._followers: defaultdict[str, set[_Follower]] = defaultdict(set)
        directory.on_moved = self._moved

    @contextmanager
    def follow(
        self, principal: Principal, call: GenerateCall, binding: Binding | None, request: Request
    ) -> Iterator[None]:
        """Moves the request while the context lasts, from when the engine has it."""
        if binding is None or call.version_policy is VersionPolicy.PIN:
            yield
            return
        name = str(parse_ref(call.adapter, call.adapter_field, principal.home_tenant))
        follower = _Follower(principal, name, binding, request)
        self._followers[name].add(follower)
        # The name may have moved since it was resolved.
        self._start(follower, call.min_revision)
        try:
            yield
        finally:
            if follower.task is not None:
                follower.task.cancel()
            self._followers[name].discard(follower)
            if not self._followers[name]:
                del self._followers[name]

    def _moved(self, name: str, revision: int) -> None:
        """Called when a name points to something else from this revision on; "": any may."""
        names = (name,) if name else tuple(self._followers)
        for each in names:
            for follower in self._followers.get(each, ()):
                self._start(follower, revision)

    def _start(self, follower: _Follower, revision: int) -> None:
        follower.revision = max(follower.revision, revision)
        if follower.task is None or follower.task.done():
            follower.task = asyncio.create_task(self._move(follower))

    def _is_running(self, follower: _Follower) -> bool:
        return follower in self._followers.get(follower.ref, ())

    async def _move(self, follower: _Follower) -> None:
        """Resolves the name until that reflects the newest revision; while the store does not
        answer, again and again: no event follows once it does."""
        revision = -1
        while self._is_running(follower) and revision < follower.revision:
            revision = follower.revision
            try:
                binding = await self._directory.resolve(
                    follower.principal, follower.ref, min_revision=revision
                )
            except StoreUnavailable:
                revision = -1
                await asyncio.sleep(RETRY_S)
            except ServiceError as error:
                logger.info("a request stays on %s: %s", follower.binding.label, error.message)
            else:
                self._move_to(follower, binding)

    def _move_to(self, follower: _Follower, binding: Binding) -> None:
        before, request = follower.binding, follower.request
        if not self._is_running(follower) or binding.digest == before.digest:
            return
        if not _is_same_text(before, binding):
            logger.info(
                "a request stays on %s: %s has another tokenizer", before.label, binding.label
            )
            return
        follower.binding = binding
        self._engine.move(request.tenant, request.request_id, binding.digest, binding.label)


def _is_same_text(before: Binding, after: Binding) -> bool:
    """Whether both read and write the same tokens."""
    return (
        before.added_tokens == after.added_tokens
        and before.tokenizer_digest == after.tokenizer_digest
        and not after.invocation_tokens
    )


def check_followed(call: GenerateCall, binding: Binding | None, home_tenant: str) -> None:
    """Raises InvalidArgument for a call that is to follow a reference that never moves, or cannot
    while it runs."""
    if call.version_policy is VersionPolicy.PIN or (binding is None and not call.parts):
        return
    if call.parts:
        reason = "the adapters of a sum"
    elif binding is not None and binding.invocation_tokens:
        reason = f"{binding.label}, which is active from its invocation tokens on (aLoRA)"
    elif parse_ref(call.adapter, call.adapter_field, home_tenant).name is None:
        reason = "a digest: give a name"
    elif parse_ref(call.adapter, call.adapter_field, home_tenant).version is not None:
        reason = f"{call.adapter}, a version: give the name alone"
    else:
        return
    raise InvalidArgument(f"version_policy: cannot follow {reason}", subject="version_policy")
