# Generated from loadout/_client/async_inference.py by `make client`: change that file.
"""Calls of the inference service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from loadout import types
from loadout._client.images import ImageCalls
from loadout._rpc import calls
from loadout._rpc.calls import Adapters
from loadout._rpc.convert import from_inference
from loadout._rpc.convert.to_chat import Prompt
from loadout._rpc.stream import Stream
from loadout.errors import StreamLost


class InferenceCalls(ImageCalls):
    """The client's methods that call the inference service."""

    def generate(
        self,
        prompt: Prompt,
        *,
        adapter: str | None = "",
        adapters: Adapters = (),
        min_revision: int = 0,
        request_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
        return_routed_experts: bool = False,
        version_policy: types.VersionPolicy = "pin",
        echo: bool = False,
        packed_logprobs: bool = False,
        add_special_tokens: bool | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        n: int = 1,
        timeout_s: float | None = None,
        **options: Unpack[types.GenerationOptions],
    ) -> Stream[types.Chunk]:
        """Starts a generation and streams its chunks. A lost request is sent again only if nothing
        was received.

        Args:
            prompt: Text, token ids, or chat messages.
            adapter: Reference of an adapter. "" or None: the base model.
            adapters: Up to 8 references, or pairs of reference and scale, to sum.
            min_revision: Use the adapter's version at this catalog revision or later.
            request_id: Id, unique among your running requests. "": the server makes one.
            priority: Requests with a higher value run earlier among your tenant's.
            cache_salt: Only requests with equal salts share cached prefixes and uploaded images.
            return_routed_experts: Return the experts chosen for tokens of prompt and output.
            version_policy: What happens when the adapter's name moves to a newer version.
            echo: Begin the answer with the prompt.
            packed_logprobs: Return log probabilities as arrays.
            add_special_tokens: Add the tokenizer's special tokens. None: to a text, not to a chat.
            add_generation_prompt: End a chat where a new answer begins. None: unless it continues.
            continue_final_message: Continue a chat's last message, which is the assistant's.
            n: Number of answers, at most 128. Their chunks come mixed, each with its `index`.
            timeout_s: Deadline of the generation in seconds. None: the client's.
            **options: How tokens are chosen, and tools of a chat; see `types.SamplingParams` and
                `types.ChatOptions`.

        Returns:
            A stream of chunks. Iterating raises LoadoutError.

        Raises:
            InvalidArgument: An argument does not fit into a request.
            TypeError: An option is unknown.
        """
        call = calls.generate(
            prompt,
            adapter,
            min_revision,
            request_id,
            priority,
            cache_salt,
            options,
            adapters=adapters,
            return_routed_experts=return_routed_experts,
            version_policy=version_policy,
            echo=echo,
            packed_logprobs=packed_logprobs,
            add_special_tokens=add_special_tokens,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            n=n,
        )
        return self._stream(call, timeout_s)

    def complete(
        self,
        prompt: Prompt,
        *,
        adapter: str | None = "",
        adapters: Adapters = (),
        min_revision: int = 0,
        request_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
        return_routed_experts: bool = False,
        version_policy: types.VersionPolicy = "pin",
        echo: bool = False,
        packed_logprobs: bool = False,
        add_special_tokens: bool | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[types.GenerationOptions],
    ) -> types.Completion:
        """Generates one answer and returns it whole. Arguments and errors are those of `generate`.

        Returns:
            The joined chunks.

        Raises:
            StreamLost: The generation ended without its last response.
        """
        [completion] = self.sample(
            prompt,
            1,
            adapter=adapter,
            adapters=adapters,
            min_revision=min_revision,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            return_routed_experts=return_routed_experts,
            version_policy=version_policy,
            echo=echo,
            packed_logprobs=packed_logprobs,
            add_special_tokens=add_special_tokens,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            timeout_s=timeout_s,
            **options,
        )
        return completion

    def sample(
        self,
        prompt: Prompt,
        n: int,
        *,
        adapter: str | None = "",
        adapters: Adapters = (),
        min_revision: int = 0,
        request_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
        return_routed_experts: bool = False,
        version_policy: types.VersionPolicy = "pin",
        echo: bool = False,
        packed_logprobs: bool = False,
        add_special_tokens: bool | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[types.GenerationOptions],
    ) -> tuple[types.Completion, ...]:
        """Generates `n` answers to one prompt. Other arguments and errors are those of `generate`.

        The prompt is computed once, unless the server runs without a prefix cache.

        Args:
            n: Number of answers, at most 128.

        Returns:
            The joined chunks of each answer.

        Raises:
            StreamLost: The generation ended without its last response.
        """
        stream = self.generate(
            prompt,
            adapter=adapter,
            adapters=adapters,
            min_revision=min_revision,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            return_routed_experts=return_routed_experts,
            version_policy=version_policy,
            echo=echo,
            packed_logprobs=packed_logprobs,
            add_special_tokens=add_special_tokens,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            n=n,
            timeout_s=timeout_s,
            **options,
        )
        chunks: list[types.Chunk] = []
        for chunk in stream:
            chunks.append(chunk)
        completions = from_inference.completions(chunks, n)
        if completions is None:
            raise StreamLost("the generation ended without its last response")
        return completions

    def tokenize(
        self,
        prompt: Prompt,
        *,
        adapter: str = "",
        add_special_tokens: bool | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        cache_salt: str = "",
        timeout_s: float | None = None,
        **options: Unpack[types.ChatOptions],
    ) -> tuple[int, ...]:
        """Returns the tokens that a prompt of `generate` would have.

        Args:
            prompt: Text, or chat messages.
            adapter: Reference of an adapter, whose tokenizer and chat template apply.
            add_special_tokens: Add the tokenizer's special tokens. None: to a text, not to a chat.
            add_generation_prompt: End a chat where a new answer begins. None: unless it continues.
            continue_final_message: Continue a chat's last message, which is the assistant's.
            cache_salt: Salt with which images were uploaded.
            timeout_s: Deadline of the call in seconds. None: the client's.
            **options: Tools and other options of a chat; see `types.ChatOptions`.

        Returns:
            The ids of the tokens.

        Raises:
            InvalidArgument: An argument does not fit into a request.
        """
        call = calls.tokenize(
            prompt,
            adapter,
            options,
            add_special_tokens,
            add_generation_prompt,
            continue_final_message,
            cache_salt,
        )
        return self._call_with_images(call, timeout_s)

    def detokenize(
        self, token_ids: Sequence[int], *, adapter: str = "", timeout_s: float | None = None
    ) -> str:
        """Returns the text of tokens, with special ones.

        Args:
            token_ids: Ids of tokens.
            adapter: Reference of an adapter, whose tokenizer applies.
            timeout_s: Deadline of the call in seconds. None: the client's.

        Returns:
            The text.

        Raises:
            InvalidArgument: An id is no token.
        """
        return self._call(calls.detokenize(token_ids, adapter), timeout_s)

    def load(
        self, ref: str, *, pin: bool = False, min_revision: int = 0, timeout_s: float | None = None
    ) -> types.ResidentAdapter:
        """Loads an adapter before its first request. Returns when it is resident.

        Args:
            ref: Reference, "[tenant/]name[@version]" or "sha256:<hex>".
            pin: Pin the adapter as soon as it is resident.
            min_revision: Load the version at this catalog revision or later.
            timeout_s: Deadline of the call in seconds. None: the client's.

        Returns:
            The resident adapter.

        Raises:
            NotFound: No adapter has this reference.
            FailedPrecondition: The model cannot serve the adapter, or pins leave no room for it.
        """
        return self._call(calls.load(ref, pin, min_revision), timeout_s)

    def pause(
        self,
        mode: str = "keep",
        *,
        resume_after_s: float | None = None,
        replica: str = "",
        timeout_s: float | None = None,
    ) -> int:
        """Pauses generation. Returns when nothing is being computed.

        Args:
            mode: What happens to running requests: "keep" holds them, "wait" lets them finish,
                "abort" ends all requests.
            resume_after_s: Resume after this many seconds, even if this process is gone. None:
                only `resume` does.
            replica: Address of one replica. "": all replicas.
            timeout_s: Deadline of each replica's call in seconds. None: the client's.

        Returns:
            The number of requests that wait.

        Raises:
            InvalidArgument: `mode` is unknown, or no replica has this address.
            FailedPrecondition: Generation was resumed before the running requests had finished.
        """
        call = calls.pause(mode, resume_after_s)
        return sum(self._at_each(call, replica, timeout_s))

    def resume(self, *, replica: str = "", timeout_s: float | None = None) -> None:
        """Resumes paused generation.

        Args:
            replica: Address of one replica. "": all replicas.
            timeout_s: Deadline of each replica's call in seconds. None: the client's.

        Raises:
            InvalidArgument: No replica has this address.
        """
        self._at_each(calls.resume(), replica, timeout_s)

    def sleep(
        self, *, weights: bool = False, replica: str = "", timeout_s: float | None = None
    ) -> int:
        """Frees the memory of keys and values, and of recurrent states, until `wake`. No running
        request is lost.

        Args:
            weights: Free the memory of the weights too.
            replica: Address of one replica. "": all replicas.
            timeout_s: Deadline of each replica's call in seconds. None: the client's.

        Returns:
            The number of freed bytes.

        Raises:
            InvalidArgument: No replica has this address.
            Unavailable: The server is waking up.
        """
        return sum(self._at_each(calls.sleep(weights), replica, timeout_s))

    def wake(self, *, replica: str = "", timeout_s: float | None = None) -> float:
        """Takes back the memory that `sleep` freed.

        Args:
            replica: Address of one replica. "": all replicas.
            timeout_s: Deadline of each replica's call in seconds. None: the client's.

        Returns:
            The seconds that the slowest replica took.

        Raises:
            InvalidArgument: No replica has this address.
            FailedPrecondition: The memory is taken, or the model's files cannot be read.
        """
        return max(self._at_each(calls.wake(), replica, timeout_s), default=0.0)

    def unload(self, ref: str, *, timeout_s: float | None = None) -> int:
        """Drains an adapter and frees its memory.

        Args:
            ref: Reference, "[tenant/]name[@version]" or "sha256:<hex>".
            timeout_s: Deadline of the call in seconds. None: the client's.

        Returns:
            The number of freed bytes.

        Raises:
            NotFound: The adapter is not resident.
            FailedPrecondition: The adapter is pinned, or still being loaded.
        """
        return self._call(calls.unload(ref), timeout_s)

    def pin_resident(self, ref: str, *, timeout_s: float | None = None) -> types.ResidentAdapter:
        """Pins an adapter in the inference service's device memory.

        Args:
            ref: Reference, "[tenant/]name[@version]" or "sha256:<hex>".
            timeout_s: Deadline of the call in seconds. None: the client's.

        Returns:
            The pinned adapter.

        Raises:
            NotFound: The adapter is not on the device.
            FailedPrecondition: Pins would leave too little space for other adapters.
        """
        return self._call(calls.pin_resident(ref), timeout_s)

    def unpin_resident(self, ref: str, *, timeout_s: float | None = None) -> types.ResidentAdapter:
        """Removes your pin of a resident adapter. It stays until others need its space.

        Args:
            ref: Reference, "[tenant/]name[@version]" or "sha256:<hex>".
            timeout_s: Deadline of the call in seconds. None: the client's.

        Returns:
            The adapter; still `pinned` if another tenant pins equal content.

        Raises:
            NotFound: The adapter is not resident.
        """
        return self._call(calls.unpin_resident(ref), timeout_s)

    def residents(
        self, limit: int = 0, *, timeout_s: float | None = None
    ) -> tuple[types.ResidentAdapter, ...]:
        """Returns one replica's resident adapters, those on the device first.

        Args:
            limit: At most this many. 0: all.
            timeout_s: Deadline of the call in seconds. None: the client's.

        Raises:
            PermissionDenied: The token does not have the role operator.
        """
        return self._call(calls.residents(limit), timeout_s)

    def inspect(self, ref: str, *, timeout_s: float | None = None) -> types.InspectedAdapter:
        """Returns a resident adapter's parts, their places in memory, and its launches per step.

        Args:
            ref: Reference, "[tenant/]name[@version]" or "sha256:<hex>".
            timeout_s: Deadline of the call in seconds. None: the client's.

        Raises:
            NotFound: The adapter is not resident, or still being loaded.
        """
        return self._call(calls.inspect(ref), timeout_s)

    def server_info(self, *, timeout_s: float | None = None) -> types.ServerInfo:
        """Returns one replica's model, limits, versions and use of memory.

        Args:
            timeout_s: Deadline of the call in seconds. None: the client's.
        """
        return self._call(calls.server_info(), timeout_s)

    def server_debug_info(self, *, timeout_s: float | None = None) -> Stream[types.DebugPart]:
        """Streams the inference service's diagnostics.

        Args:
            timeout_s: Deadline of the call in seconds. None: the client's.

        Returns:
            A stream of files.

        Raises:
            PermissionDenied: The token does not have the role operator for all tenants. Iterating
                raises this.
        """
        call = calls.server_debug_info()
        return Stream(self._channels.route(call), call, self._attempts(timeout_s))

    def profile(
        self,
        num_steps: int,
        *,
        rank: int = 0,
        wait_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Stream[types.TracePiece]:
        """Streams a trace of the server's next steps. Closing the stream ends the tracing.

        Args:
            num_steps: Number of steps, at most 200.
            rank: Process to trace, of several that compute the model together.
            wait_s: Seconds that the server waits for steps, at most 300. None: 30.
            timeout_s: Deadline of the call in seconds. None: the client's.

        Returns:
            A stream of pieces of gzipped JSON in Chrome's trace format.

        Raises:
            FailedPrecondition: The server traces for another caller. Iterating raises this.
            DeadlineExceeded: No step ran within `wait_s`. Iterating raises this.
        """
        call = calls.profile(num_steps, wait_s, rank)
        return Stream(self._channels.route(call), call, self._attempts(timeout_s))

    def replicas(self) -> tuple[types.Replica, ...]:
        """Returns the inference service's replicas as this client knows them now.

        It starts new probes of replicas whose last probe is old, and does not wait for them.

        Raises:
            InvalidArgument: The client has no address of the inference service.
        """
        fleet = self._channels.fleet
        fleet.refresh()
        return fleet.replicas.statuses()
