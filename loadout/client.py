# Generated from loadout/aio.py by `make client`: change that file.
"""The Python client: registers adapters and generates with them.

with Client(inference="127.0.0.1:7080", store="127.0.0.1:7070") as client:
    registration = client.register("french", "s3://adapters/french")
    for chunk in client.generate("Bonjour", adapter="french", max_tokens=32):
        print(chunk.text, end="")
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loadout import types
from loadout._client.embedding import EmbeddingCalls
from loadout._client.inference import InferenceCalls
from loadout._client.store import StoreCalls
from loadout._push.push import Push, Wait, check_wait
from loadout._push.result import Pushed
from loadout._routing.fleet import RESOLVE_TIMEOUT_S
from loadout._rpc import calls, threads


class Client(StoreCalls, InferenceCalls, EmbeddingCalls):
    """Blocking client of one or both services; safe to share between threads.

    With several replicas of the inference service, an adapter's calls go to the replica that the
    adapter's key belongs to. They pass over unhealthy replicas; generations also pass over replicas
    with more than their share of the load. Calls without an adapter go to the least loaded replica.
    If one replica of the store fails a call, another takes it.

    All methods raise LoadoutError; the sections Raises name its most common kinds.

    Args:
        inference: Address of the inference service, "host:port". For replicas, several addresses,
            as a sequence or with commas, or a name that resolves to several.
        store: Address of the adapter store, or addresses of its replicas.
        timeout_s: Deadline in seconds of calls that are given none, over all attempts. None: none.
        retry: How often and when a failed call is tried again. None: `RetryPolicy()`.
        token: Token that is sent with every call.
        tls: True trusts the public authorities; a TlsConfig names others, and this client's own
            certificate. None or False: no TLS.
        allow_insecure_token: Send the token without TLS to other machines, because you trust the
            network.
        tenant: Tenant of adapter names without one. Set it to the token's tenant, so that all
            callers choose the same replica.
        tracing: True makes each call a span of the application's OpenTelemetry; a provider, a span
            of that provider.
        channel_factory: Opens the gRPC channels, for interceptors or options of your own.

    Raises:
        InvalidArgument: An argument is invalid; `subject` names it.
    """

    def push(
        self,
        name: str,
        tensors: Mapping[str, Any],
        config: Any,
        *,
        wait: Wait = None,
        keep: int | None = None,
        ttl: float | None = None,
        ephemeral: bool = True,
        base_model: str = "",
        if_current_digest: str = "",
        labels: Mapping[str, str] | None = None,
        description: str = "",
        group: Any = None,
        timeout_s: float | None = None,
    ) -> Pushed:
        """Records an adapter from memory, and has replicas load it. See docs/trainers.md.

        Args:
            name: Name of the adapter, "[tenant/]name".
            tensors: Tensors of torch or numpy by PEFT's names, or by those of the model's state
                dict. They are sent one at a time, without a file or a second copy.
            config: PEFT's LoraConfig, a mapping, or JSON.
            wait: "all" returns when every replica that is up and serves the base model has loaded
                the version; "any", when one has. None: do not wait.
            keep: As in `register`. None: 0.
            ttl: Seconds after which the store deletes this version, even if current. None: never.
            ephemeral: Keep the content only in the store's memory. It is lost when the store ends;
                no version or revision is used twice.
            base_model: As in `register`.
            if_current_digest: Refuse unless the name points to this digest now.
            labels: Labels for filters, at most 64.
            description: Free text, at most 4096 characters.
            group: Process group whose ranks all push together, for DTensors (FSDP2). The first
                rank sends; all return or raise the same. None: all ranks, if any tensor is a
                DTensor. Name it if a rank may have no DTensor, or no tensor.
            timeout_s: Deadline of the push in seconds. None: the client's.

        Returns:
            The registration, and the replicas that have loaded the adapter.

        Raises:
            InvalidArgument: A tensor or a config key is invalid; `subject` names it.
            NotLoaded: The version is recorded, but a replica, named by `subject`, cannot load it.
        """
        check_wait(wait)
        if wait is not None:
            threads.wait(self._channels.fleet.refresh(), RESOLVE_TIMEOUT_S)
        new = calls.NewAdapter(
            name,
            base_model,
            if_current_digest=if_current_digest,
            labels=labels,
            description=description,
            keep=keep or 0,
            ttl_s=ttl,
        )
        meta = calls.upload_meta(new, ephemeral=ephemeral)
        seconds = self._timeout_s if timeout_s is None else timeout_s
        push = Push(meta, wait, seconds, self._upload, self._load_at, self.replicas)
        return push.run(tensors, config, group)

    def _load_at(
        self, address: str, name: str, revision: int, timeout_s: float | None
    ) -> types.ResidentAdapter:
        """Loads at one replica, even if it seemed to be down. Does not wait for a replica that
        refuses because it drains or sleeps."""
        call = calls.load(name, False, revision)
        route = self._channels.replica_route(call, address)
        loaded = self._finish(call, route, timeout_s, waits_if_gone=False)
        self._channels.fleet.replicas.mark_healthy(address)
        return loaded
