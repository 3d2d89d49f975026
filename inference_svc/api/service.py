"""The use cases, independent of transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

from inference_svc.adapters.layout import ModelLayout
from inference_svc.api.access import Access, Caller
from inference_svc.api.followers import Followers, check_followed
from inference_svc.api.generate_call import GenerateCall, check_grammar
from inference_svc.api.generate_stream import GenerateStream
from inference_svc.api.life_cycle import LifeCycle
from inference_svc.api.pictures import CallPictures, ImageUploads, PictureReader
from inference_svc.api.pooling.classify import with_head
from inference_svc.api.pooling.score import with_answer_tokens
from inference_svc.api.request_record import PromptNote, RequestLog
from inference_svc.api.residents import Residents
from inference_svc.api.server_facts import ServerFacts
from inference_svc.api.thoughts import Thoughts
from inference_svc.api.tools import ReadingOptions
from inference_svc.core import Action, Principal, Request
from inference_svc.engine.control.status_types import GRAMMARS, EngineStatus
from inference_svc.engine.transport.messages import SetVocabulary
from inference_svc.frontend.async_engine import AsyncEngine
from inference_svc.grammars.budget import ThoughtBudget
from inference_svc.grammars.checks import GrammarChecks
from inference_svc.host.memory import resident_bytes
from inference_svc.results.base import Kind
from inference_svc.store.adapter_resolver import Binding, Directory
from inference_svc.store.texts import AdapterTexts
from inference_svc.store.types import AdapterPage, Registry
from inference_svc.text.answers.families import AnswerReader
from inference_svc.text.chat import Chat
from inference_svc.text.detokenizer import TokenDecoder
from inference_svc.text.encoder import Terms
from inference_svc.text.no_tokenizer import NO_TOKENIZER
from inference_svc.text.pair import Encoded
from inference_svc.text.prompt import MIN_CHARS, Prompt, PromptEncoder, Refused, num_chars_of
from inference_svc.text.text_model import TextModel
from servicekit.errors import InvalidArgument
from servicekit.shares import Shares
from servicekit.telemetry.spans import child_span
from servicekit.work_budget import WorkBudget

TRACE_CHUNK_BYTES = 256 << 10


class IncomingCall(Protocol):
    """A call to generate that a transport has received. `adapter` is the caller's reference as far
    as it is known before `read`."""

    @property
    def request_id(self) -> str: ...
    @property
    def adapter(self) -> str: ...
    def accept(self, caller: Principal) -> int:
        """Returns how many bytes are to be held for the call, once its caller is authorised; 0 if
        its transport does. Raises InvalidArgument, ShareExceeded, and errors of its transport."""
        ...

    @property
    def num_read(self) -> int:
        """How many bytes were read for it; 0 if its transport has charged them."""
        ...

    async def read(self, parsers: Executor) -> GenerateCall:
        """Converts the call, and keeps nothing else of it; converts large ones in one of the
        `parsers`. Raises InvalidArgument naming the field, and errors of its transport."""
        ...


class TraceFile(NamedTuple):
    """The open file of a step trace."""

    num_steps: int
    file: BinaryIO

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yields its content, read off the event loop."""
        while chunk := await asyncio.to_thread(self.file.read, TRACE_CHUNK_BYTES):
            yield chunk


SMALL_BYTES = 64 << 10
"""A call that takes no more is read whatever work the caller's earlier ones took."""
READ_BYTES_PER_SECOND = 200 << 20
"""The approximate rate at which one processor reads large calls."""
END_TOKENS = 32
"""The end of a prompt in which the marker before thoughts is, if the prompt ends with it."""
PLACE_SECONDS = 10.0
"""How long a call waits to be read while too many bytes of others are."""


class Service:
    """The use cases; its parts `residents` and `life_cycle` are operators', `uploads` callers'.
    Everything runs on one event loop. `layout` describes all that adapters may change. `registry`
    None: there is no store. `reading` bounds the bytes of calls that are read, converted and
    tokenised at once, `work` the processor time of large ones."""

    def __init__(
        self,
        facts: ServerFacts,
        layout: ModelLayout,
        engine: AsyncEngine,
        directory: Directory,
        registry: Registry | None,
        prompts: PromptEncoder,
        text: TextModel,
        texts: AdapterTexts | None,
        reading: Shares,
        work: WorkBudget,
        request_log: RequestLog,
        access: Access,
        grammars: GrammarChecks,
        pictures: PictureReader,
    ) -> None:
        self.facts = facts
        self.layout = layout
        self._engine = engine
        self._directory = directory
        self._registry = registry
        self._prompts = prompts
        self._text = text
        self._texts = texts
        self._reading = reading
        self._work = work
        self._request_log = request_log
        self.access = access
        self._grammars = grammars
        self._pictures = pictures
        self._has_vocabulary = False
        self.residents = Residents(engine.calls, directory, registry, facts.base_model, access)
        self.life_cycle = LifeCycle(engine.calls, access)
        self.uploads = ImageUploads(pictures, work)
        self._followers = Followers(directory, engine)

    # --- generating -----------------------------------------------------------------------------

    async def generate(self, caller: Caller, incoming: IncomingCall) -> GenerateStream:
        """Returns the stream of deltas once the call is read, its adapter resolved and its prompts
        tokenised. Raises Unauthenticated, PermissionDenied, InvalidArgument, errors of `read`, and
        like `resolve`."""
        request_id, adapter = incoming.request_id, incoming.adapter
        log, pictures = self._request_log, self._pictures.of_call()
        with log.record_if_failed(request_id, adapter) as record, pictures as own:
            principal = self.access.authenticate(caller)
            record.authenticate(principal)
            principal.require(Action.GENERATE)
            async with self._place_for(principal, incoming.accept(principal)):
                threads = self._prompts.threads_of(principal.account)
                try:
                    call = await incoming.read(self._work.measured(principal.account, threads))
                finally:
                    record.adapter = incoming.adapter
                    self._work.charge(principal.account, incoming.num_read / READ_BYTES_PER_SECOND)
                call = _served(call, self.facts)
                record.request_id = call.request_id
                record.prompt = self._request_log.note_of(call.prompts[0])
                binding = await self._resolve_call(principal, call)
                record.bind(binding)
                check_followed(call, binding, principal.home_tenant)
                call = with_head(call, binding, self.facts)
                text = await self._text_of(binding, principal)
                reading = _reading(call, text)
                call = with_answer_tokens(call, text, self._prompts, binding)
                made, prompts = await self._to_requests(call, binding, principal, text, own)
                call.check_stops(made, self.facts.eos_token_ids)
                requests = call.bounded(made)
                decoder, ends = _ends(call, reading, requests, text)
                call, budget = self._formed(call, reading, text, ends)
                readers = _readers(call, reading, text, ends)
                has_ends = bool(self.facts.eos_token_ids or requests[0].sampling.stop_token_ids)
                call = await self._with_grammar(call, has_ends, principal, threads)
                requests = [replace(each, grammar=call.grammar, budget=budget) for each in requests]
        return GenerateStream(
            call.without_prompts(),
            prompts,
            principal,
            binding,
            requests,
            self._engine,
            self._followers,
            self._request_log,
            record,
            self.facts.base_model,
            text,
            decoder,
            own,
            readers,
        )

    @asynccontextmanager
    async def reading(self, principal: Principal, num_bytes: int) -> AsyncIterator[Executor]:
        """Holds the memory for a call of this size while it is read, and until its prompts are
        tokens; yields the threads that parse it. Raises ShareExceeded."""
        async with self._place_for(principal, num_bytes):
            threads = self._prompts.threads_of(principal.account)
            try:
                yield self._work.measured(principal.account, threads)
            finally:
                self._work.charge(principal.account, num_bytes / READ_BYTES_PER_SECOND)

    async def encode(
        self,
        principal: Principal,
        adapter: str,
        prompt: Prompt,
        subject: str = "model",
        cache_salt: str = "",
    ) -> tuple[tuple[int, ...], TextModel]:
        """Returns a prompt's tokens, as `generate` makes them, and the text model of the adapter,
        which the caller knows as `subject`. Raises like `generate`."""
        binding = await self.resolve(principal, adapter, subject=subject)
        text = await self._text_of(binding, principal)
        if isinstance(prompt, Chat):
            ReadingOptions(prompt.tools).check(text.answers)
        num_added = 0 if binding is None else binding.added_tokens
        with self._pictures.of_call() as pictures:
            own = pictures.of_prompt(prompt, text.name_of, principal.account, cache_salt)
            terms = Terms(principal.account, text, num_added)
            encoded = await self._prompts.encode(prompt, terms, pictures=own)
            pictures.release()
        return encoded.token_ids, text

    async def _text_of(self, binding: Binding | None, principal: Principal) -> TextModel:
        """Returns the text model that converts a call's prompts and answers: the adapter's, or the
        model's. Raises like AdapterTexts.get, also for prompts of token ids: their answers are
        texts, too."""
        if binding is None or self._texts is None:
            return self._text
        threads = self._prompts.threads_of(principal.account)
        return await self._texts.get(binding, principal.account, threads)

    async def _with_grammar(
        self, call: GenerateCall, has_ends: bool, principal: Principal, threads: Executor
    ) -> GenerateCall:
        """Returns the call with its grammar as it was checked. Raises like `check_grammar`,
        InvalidArgument for one that cannot be enforced, and ShareExceeded."""
        if call.grammar is None:
            return call
        check_grammar(call, has_ends=has_ends)
        tenant, account = principal.home_tenant, principal.account
        grammar = await self._grammars.check(call.grammar, tenant, account, threads)
        if not self._has_vocabulary:
            self._has_vocabulary = True
            self._engine.send(SetVocabulary(self._grammars.vocabulary))
        return replace(call, grammar=grammar)

    def _formed(
        self,
        call: GenerateCall,
        reading: ReadingOptions | None,
        text: TextModel,
        prompts: Sequence[str],
    ) -> tuple[GenerateCall, ThoughtBudget | None]:
        """Returns the call with the form of its whole answers to `prompts`, which are the ends of
        them, and the bound on their thoughts. Raises InvalidArgument."""
        if reading is None:
            return call, None
        ends = {*self.facts.eos_token_ids, *text.end_ids}
        thoughts = Thoughts(reading, text, prompts[0], self.facts.vocab_size, ends)
        grammar = thoughts.form(call.grammar)
        return replace(call, grammar=grammar), thoughts.budget(has_form=grammar is not None)

    @asynccontextmanager
    async def _place_for(self, caller: Principal, num_bytes: int) -> AsyncIterator[None]:
        """Holds the memory for a call of this size. Raises ShareExceeded if there is none in time,
        or the call is large and the caller's earlier ones took too much work."""
        if num_bytes == 0:
            yield
            return
        if num_bytes > SMALL_BYTES:
            await self._work.wait(caller.account)
        place = await self._reading.wait(caller.account, num_bytes, PLACE_SECONDS)
        with place:
            yield

    async def resolve(
        self, principal: Principal, ref: str, min_revision: int = 0, subject: str = "adapter"
    ) -> Binding | None:
        """Returns the adapter of a call; None for `ref` "", the base model. Raises like
        Directory.resolve."""
        if not ref:
            return None
        with child_span("resolve"):
            return await self._directory.resolve(principal, ref, min_revision, subject)

    async def _resolve_call(self, principal: Principal, call: GenerateCall) -> Binding | None:
        """Resolves each part of a sum as it would be alone. Raises InvalidArgument, naming
        it, for an adapter that cannot be a part, and like Directory.resolve."""
        if not call.parts:
            return await self.resolve(
                principal, call.adapter, call.min_revision, call.adapter_field
            )
        parts: list[tuple[Binding, float]] = []
        for index, (ref, scale) in enumerate(call.parts):
            subject = f"adapters[{index}].ref"
            binding = await self.resolve(principal, ref, call.min_revision, subject)
            assert binding is not None
            if binding.invocation_tokens:
                raise InvalidArgument(
                    f"{subject}: {binding.label} is active from its invocation tokens on (aLoRA): "
                    "use it alone",
                    subject=subject,
                )
            for earlier, _ in parts:
                if earlier.digest == binding.digest:
                    raise InvalidArgument(
                        f"{subject}: {binding.label} and {earlier.label} are the same "
                        "adapter: name it once, with the sum of both scales",
                        subject=subject,
                    )
            parts.append((binding, scale))
        return Binding.of_parts(parts)

    async def _to_requests(
        self,
        call: GenerateCall,
        binding: Binding | None,
        principal: Principal,
        text: TextModel,
        pictures: CallPictures,
    ) -> tuple[list[Request], tuple[PromptNote, ...]]:
        """Returns the requests, and a note of each prompt. Raises InvalidArgument for an invalid
        prompt."""
        requests: list[Request] = []
        notes: list[PromptNote] = []
        num_tokens = num_chars = 0
        terms = Terms(
            principal.account,
            text,
            0 if binding is None else binding.added_tokens,
            call.num_answer_tokens,
            call.prompt_limit,
        )
        ahead: list[Encoded | Refused] = []
        for index, prompt in enumerate(call.prompts):
            with child_span("tokenize"), _naming_prompt(call, index):
                salt = call.cache_salt
                own = pictures.of_prompt(prompt, text.name_of, principal.account, salt)
                ahead = ahead or await self._prompts.encode_next(
                    call.prompts, index, terms, num_chars, own
                )
                encoded, *ahead = ahead
                if not isinstance(encoded, Encoded):
                    raise encoded
            num_chars += max(num_chars_of(prompt), MIN_CHARS)
            notes.append(self._request_log.note_of(prompt))
            num_tokens += len(encoded.token_ids)
            _check_prompt_tokens(call, num_tokens)
            made = call.to_requests(
                index,
                encoded,
                binding,
                principal.home_tenant,
                self.facts.max_model_len,
                end_ids=text.end_ids,
                vocab_size=self.facts.vocab_size,
            )
            requests += pictures.placed(made, own.tiles)
        return requests, tuple(notes)

    # --- describing -----------------------------------------------------------------------------

    @property
    def has_store(self) -> bool:
        return self._registry is not None

    @property
    def layout_id(self) -> str:
        """The id of the layout; "" until the store has accepted it."""
        return self._directory.layout_id

    async def describe(self) -> EngineStatus:
        status = await self._engine.calls.describe()
        own = sum(map(resident_bytes, self._grammars.process_ids))
        if not own:
            return status
        num_bytes = own + status.memory.get(GRAMMARS, (0, 0))[0]
        return replace(status, memory=status.memory | {GRAMMARS: (num_bytes, num_bytes)})

    @asynccontextmanager
    async def profile(
        self, num_steps: int, timeout_s: float, rank: int
    ) -> AsyncIterator[TraceFile]:
        """Traces the next steps of a rank; the file is open while the context lasts. Raises
        ProfileRunning, NoSteps, and InvalidArgument for a rank that there is not."""
        trace = await self._engine.calls.profile(num_steps, timeout_s, rank)
        try:
            with Path(trace.path).open("rb") as file:
                yield TraceFile(trace.num_steps, file)
        finally:
            trace.remove()

    async def list_adapters(
        self, principal: Principal, page_size: int, page_token: str
    ) -> AdapterPage:
        """Returns the adapters of a page of the catalog that the caller can generate with here.
        Raises StoreUnavailable, and InvalidArgument for a token of another list."""
        if self._registry is None:
            return AdapterPage([], "")
        tenants = () if principal.tenants is None else principal.tenants
        page = await self._registry.list_adapters(tenants, page_size, page_token)
        servable = [record for record in page.records if self._directory.is_servable(record)]
        return AdapterPage(servable, page.next_token)


@contextmanager
def _naming_prompt(call: GenerateCall, index: int) -> Iterator[None]:
    """Has an error about one of several prompts name the caller's field of it."""
    try:
        yield
    except InvalidArgument as error:
        if error.subject != "prompt" or not call.prompts_field:
            raise
        field = call.prompt_field(index)
        raise InvalidArgument(f"{field}: {error.message}", subject=field) from None


def _check_prompt_tokens(call: GenerateCall, num_tokens: int) -> None:
    """Raises InvalidArgument if the prompts have too many tokens in all."""
    most, field = call.max_prompt_tokens, call.prompts_field
    if most is not None and num_tokens > most:
        raise InvalidArgument(
            f"{field} has more than {most} tokens in all: send it in several requests",
            subject=field,
        )


def _reading(call: GenerateCall, text: TextModel) -> ReadingOptions | None:
    """Returns how the call's answers are read, if they are. Raises InvalidArgument."""
    if call.reading is None:
        return None
    call.reading.check(text.answers)
    if not call.reading.reads(text.answers):
        return None
    [prompt] = call.prompts
    if isinstance(prompt, Chat) and prompt.continue_final_message:
        is_thinking = text.answers.is_thinking(prompt.messages[-1].content)
        return replace(call.reading, is_thinking=is_thinking)
    return call.reading


def _ends(
    call: GenerateCall,
    reading: ReadingOptions | None,
    requests: Sequence[Request],
    text: TextModel,
) -> tuple[TokenDecoder, list[str]]:
    """Returns the decoder of answers, and the end of each request's prompt for their readers."""
    if reading is None:
        return text, []
    has_form = bool(reading.forced) or call.grammar is not None
    decoder = text.showing(reading.specials(text.answers, has_form=has_form))
    ends = [decoder.decode(request.prompt_token_ids[-END_TOKENS:]) for request in requests]
    return decoder, ends


def _readers(
    call: GenerateCall, reading: ReadingOptions | None, text: TextModel, ends: Sequence[str]
) -> list[AnswerReader]:
    """Returns the reader of each answer, whose prompts have these `ends`."""
    if reading is None:
        return []
    return reading.readers(text.answers, ends, has_form=call.grammar is not None)


def _served(call: GenerateCall, facts: ServerFacts) -> GenerateCall:
    """Returns the call with this server's facts. Raises InvalidArgument, naming it, for a field
    that this server cannot honour."""
    if call.kind is Kind.GENERATE and not facts.generates:
        raise InvalidArgument(
            f"{facts.base_model} has no head, and does not generate: it embeds", subject="adapter"
        )
    if call.sampling.stop and not facts.has_tokenizer:
        detail = f"{call.stop_field}: {NO_TOKENIZER}: use stop_token_ids"
        raise InvalidArgument(detail, subject=call.stop_field)
    if call.grammar is not None and not facts.has_tokenizer:
        field = call.grammar.field
        raise InvalidArgument(f"{field}: {NO_TOKENIZER}, and so no texts of tokens", subject=field)
    # More than may run would wait in the queue, of which others have less then.
    most = call.max_running and min(call.max_running, facts.max_sequences)
    return replace(call, wanted=call.wanted.served_by(facts), max_running=most)
