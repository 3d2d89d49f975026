"""Runs the requests of one call, and merges their deltas."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace

from inference_svc.api.followers import Followers
from inference_svc.api.generate_call import GenerateCall
from inference_svc.api.pictures import CallPictures
from inference_svc.api.request_record import PromptNote, RequestLog, RequestRecord
from inference_svc.api.tools import read_delta
from inference_svc.core import Principal, Request
from inference_svc.frontend.async_engine import AsyncEngine
from inference_svc.frontend.output_stream import Delta
from inference_svc.store.adapter_resolver import Binding
from inference_svc.text.answers.families import AnswerReader
from inference_svc.text.detokenizer import TokenDecoder
from inference_svc.text.text_model import TextModel

Deltas = AsyncGenerator[tuple[int, Delta], None]

INLINE_TOKENS = 1024
"""The text of shorter prompts is made on the event loop."""


@dataclass(frozen=True, slots=True)
class GenerateStream:
    """A call that is ready to run: its adapter is resolved, its prompts are tokenised, and only the
    record's facts about them are kept. `text` is the adapter's, or the model's."""

    call: GenerateCall
    prompts: Sequence[PromptNote]
    principal: Principal
    binding: Binding | None
    requests: Sequence[Request]
    engine: AsyncEngine
    followers: Followers
    request_log: RequestLog
    record: RequestRecord
    base_model: str
    text: TextModel
    decoder: TokenDecoder
    pictures: CallPictures
    readers: Sequence[AnswerReader] = ()
    """Readers of each request's answer, as the `decoder` decodes it; without them its text is given
    as it is."""

    @asynccontextmanager
    async def deltas(self) -> AsyncIterator[Deltas]:
        """Yields each delta with the index of its request; the first error ends them all. Raises
        like AsyncEngine.generate.

        Leaving the context cancels requests that still run. Each request has a record of its own,
        which closes as it ends; an error of the context's body is the error of the requests that
        still run.
        """
        failure = _Failure()
        run = self._run(0, failure) if len(self.requests) == 1 else self._merged(failure)
        async with aclosing(run) as deltas:
            try:
                yield deltas
            except Exception as error:
                failure.error = error
                raise
            finally:
                self.pictures.release()

    async def _merged(self, failure: _Failure) -> Deltas:
        # One call does not fill the engine with its many requests: they start as others end.
        num_places = min(self.call.max_running or len(self.requests), len(self.requests))
        places = asyncio.Semaphore(num_places)
        # No longer than this, so that a slow reader's deltas grow instead of their number, and
        # requests that have ended keep their places until it has read some.
        arrived: asyncio.Queue[tuple[int, Delta] | Exception] = asyncio.Queue(num_places)
        are_read = [asyncio.Event() for _ in self.requests]

        async def feed(index: int) -> None:
            try:
                await places.acquire()
                async with aclosing(self._run(index, failure)) as deltas:
                    async for each in deltas:
                        await arrived.put(each)
                        if each[1].finish_reason is not None:
                            places.release()
                            # Until then its results count as unread: they may be large.
                            await are_read[index].wait()
            except Exception as error:
                if failure.error is None:  # else nobody reads the queue any more
                    await arrived.put(error)

        feeds = [asyncio.create_task(feed(index)) for index in range(len(self.requests))]
        try:
            num_running = len(self.requests)
            while num_running:
                item = await arrived.get()
                if isinstance(item, Exception):
                    failure.error = item
                    raise item
                yield item
                if item[1].finish_reason is not None:
                    num_running -= 1
                    are_read[item[0]].set()
            await asyncio.gather(*feeds)  # which have nothing left but to end
        finally:
            for each in feeds:
                each.cancel()
            await asyncio.gather(*feeds, return_exceptions=True)

    async def _run(self, index: int, failure: _Failure) -> Deltas:
        request = self.requests[index]
        with (
            self.request_log.fork(self.record, request.request_id) as record,
            failure.replaces_cancellation(),
        ):
            record.prompt = self.prompts[index // self.call.num_choices]
            if self.call.max_running:  # it has waited for its own call's requests until now
                request = replace(request, arrival_s=time.monotonic())
            trace = record.start(request, self.base_model)
            if not self.call.is_id_unique:
                request = replace(
                    request, request_id=f"{request.request_id}-{secrets.token_hex(8)}"
                )
            if trace is not None:
                request = replace(request, trace=trace.span.context)
            reader = self.readers[index] if self.readers else None
            running = self.engine.generate(
                request,
                request.tenant,
                self.principal.account,
                trace,
                decoder=self.decoder,
                withholds_parts=self.call.withholds_parts,
            )
            following = self.followers.follow(self.principal, self.call, self.binding, request)
            owes_prompt = self.call.echo
            async with aclosing(running) as deltas:
                with following:
                    async for delta in deltas:
                        if reader is not None:
                            await read_delta(reader, delta)
                        record.add(delta)
                        if owes_prompt:
                            yield index, await self._echoed(request)
                            owes_prompt = False
                        yield index, delta

    async def _echoed(self, request: Request) -> Delta:
        """Returns the prompt; of a long one the text is made in a thread."""
        token_ids = request.prompt_token_ids
        if len(token_ids) <= INLINE_TOKENS:
            return Delta(text=self.text.decode(token_ids), echoed_ids=token_ids)
        text = await asyncio.to_thread(self.text.decode, token_ids)
        return Delta(text=text, echoed_ids=token_ids)


class _Failure:
    """The error that ended the requests of a call: of one of them, or of who reads their deltas."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    @contextmanager
    def replaces_cancellation(self) -> Iterator[None]:
        """Raises the error in requests that are cancelled because of it: their caller has not
        left."""
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            if self.error is not None:
                raise self.error from None
            raise
