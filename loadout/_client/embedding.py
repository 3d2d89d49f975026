# Generated from loadout/_client/async_embedding.py by `make client`: change that file.
"""Calls of the inference service that pool inputs to vectors, scores and labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from loadout import types
from loadout._client import pooled_calls
from loadout._rpc.caller import Caller
from loadout._rpc.calls import Adapters, StreamCall
from loadout._rpc.convert.embedding import (
    Inputs,
    LabelInputs,
    joined_embedding,
    joined_tokens,
)
from loadout._rpc.stream import Stream
from loadout.errors import StreamLost

R = TypeVar("R", types.Embedding, types.Score, types.Classification, types.TokenClassification)


class EmbeddingCalls(Caller):
    """The client's methods that embed, score and classify."""

    def embed(
        self,
        inputs: Inputs,
        *,
        adapter: str | None = "",
        adapters: Adapters = (),
        dimensions: int = 0,
        pooling: types.Pooling | None = None,
        normalize: bool | None = None,
        prompt_name: str = "",
        truncation: types.Truncation | None = None,
        max_tokens: int = 0,
        min_revision: int = 0,
        request_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
        timeout_s: float | None = None,
    ) -> tuple[types.Embedding, ...]:
        """Embeds inputs: each becomes one vector. A lost request is sent again only if nothing was
        received.

        Args:
            inputs: A text, token ids, or up to 2,048 of these.
            adapter: Reference of an adapter. "" or None: the base model.
            adapters: Up to 8 references, or pairs of reference and scale, to sum.
            dimensions: Return only this many of the first numbers of each vector. 0: all.
            pooling: The tokens whose hidden states are averaged; "none": each token has a vector.
                None: the model's choice.
            normalize: Scale vectors to length 1. None: the model's choice.
            prompt_name: One of the model's prompts, such as "query", to put before each text. "":
                the model's default prompt, if it has one.
            truncation: The end at which inputs that are too long are cut. None: they are refused.
            max_tokens: Most tokens of each input. 0: as many as the model embeds.
            min_revision: Use the adapter's version at this catalog revision or later.
            request_id: Id, unique among your running requests. "": the server makes one.
            priority: Requests with a higher value run earlier among your tenant's.
            cache_salt: Only requests with equal salts share cached prefixes.
            timeout_s: Deadline of the call in seconds. None: the client's.

        Returns:
            The vectors, in the order of the inputs.

        Raises:
            InvalidArgument: An argument does not fit into a request, or an input into the context.
            StreamLost: The call ended without all vectors.
        """
        call = pooled_calls.embed(
            inputs,
            pooling,
            truncation,
            max_tokens=max_tokens,
            adapter=adapter,
            adapters=adapters,
            dimensions=dimensions,
            normalize=normalize,
            prompt_name=prompt_name,
            min_revision=min_revision,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
        )
        return self._in_order(call, timeout_s, joined_embedding)

    def score(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str = "",
        raw: bool = False,
        truncation: types.Truncation | None = None,
        max_tokens: int = 0,
        adapter: str | None = "",
        adapters: Adapters = (),
        min_revision: int = 0,
        request_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
        timeout_s: float | None = None,
    ) -> tuple[types.Score, ...]:
        """Scores documents for a query: how probable it is that the model answers "yes", and not
        "no", or the score of a cross-encoder. Other arguments are those of `embed`.

        Args:
            query: The query.
            documents: Up to 2,048 texts.
            instruction: What makes a document relevant. "": it answers a web search query. Only
                for models that generate.
            raw: Return a cross-encoder's output in place of the score that is made of it.
            truncation: The end at which documents that are too long are cut; a cross-encoder cuts
                the longer one of query and document first. None: they are refused.
            max_tokens: Most tokens of a query and a document. 0: as many as fit into the context.

        Returns:
            The scores, in the order of the documents.

        Raises:
            InvalidArgument: The model has neither a chat template nor a head with one output, or a
                document does not fit.
            StreamLost: The call ended without all scores.
        """
        call = pooled_calls.scores(
            documents,
            truncation,
            query=query,
            instruction=instruction,
            raw=raw,
            max_tokens=max_tokens,
            adapter=adapter,
            adapters=adapters,
            min_revision=min_revision,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
        )
        return self._in_order(call, timeout_s)

    def classify(
        self,
        inputs: LabelInputs,
        *,
        raw: bool = False,
        truncation: types.Truncation | None = None,
        max_tokens: int = 0,
        adapter: str | None = "",
        adapters: Adapters = (),
        min_revision: int = 0,
        request_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
        timeout_s: float | None = None,
    ) -> tuple[types.Classification, ...]:
        """Classifies inputs by the adapter's own head or else by the model's. Other arguments are
        those of `embed`.

        Args:
            inputs: A text, token ids, or up to 2,048 of these; a list may also have pairs of texts,
                such as a premise and a hypothesis.
            raw: Return the head's outputs in place of probabilities.

        Returns:
            The labels, in the order of the inputs.

        Raises:
            InvalidArgument: Neither the adapter nor the model has a head.
            StreamLost: The call ended without all labels.
        """
        call = pooled_calls.classify(
            inputs,
            truncation,
            raw=raw,
            max_tokens=max_tokens,
            adapter=adapter,
            adapters=adapters,
            min_revision=min_revision,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
        )
        return self._in_order(call, timeout_s)

    def classify_tokens(
        self,
        inputs: LabelInputs,
        *,
        raw: bool = False,
        truncation: types.Truncation | None = None,
        max_tokens: int = 0,
        adapter: str | None = "",
        adapters: Adapters = (),
        min_revision: int = 0,
        request_id: str = "",
        priority: int = 0,
        cache_salt: str = "",
        timeout_s: float | None = None,
    ) -> tuple[types.TokenClassification, ...]:
        """Classifies each token of inputs, as `classify` does inputs.

        Args:
            inputs: A text, token ids, or up to 2,048 of these; a list may also have pairs of texts,
                such as a premise and a hypothesis.
            raw: Return the head's outputs in place of probabilities.

        Returns:
            The labels of all tokens, in the order of the inputs.

        Raises:
            InvalidArgument: Neither the adapter nor the model has a head, or the model's head
                reads the first token alone.
            StreamLost: The call ended without all labels.
        """
        call = pooled_calls.classify_tokens(
            inputs,
            truncation,
            raw=raw,
            max_tokens=max_tokens,
            adapter=adapter,
            adapters=adapters,
            min_revision=min_revision,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
        )
        return self._in_order(call, timeout_s, joined_tokens)

    def _in_order(
        self,
        call: StreamCall[R],
        timeout_s: float | None,
        joined: Callable[[Sequence[R]], R] = lambda parts: parts[-1],
    ) -> tuple[R, ...]:
        found: dict[int, list[R]] = {}
        stream = Stream(self._channels.route(call), call, self._attempts(timeout_s))
        for each in stream:
            found.setdefault(each.index, []).append(each)
        # The last response of an input has its times.
        is_whole = all(parts[-1].timings is not None for parts in found.values())
        if len(found) != call.num_items or not is_whole:
            raise StreamLost("the call ended without all results")
        return tuple(joined(found[index]) for index in sorted(found))
