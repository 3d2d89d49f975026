import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from inference_svc.core import FinishReason
from inference_svc.engine.transport.messages import Reply, StepOutputs, StepTrace
from inference_svc.errors import AdapterUnavailable, DuplicateRequest, EngineFailed
from inference_svc.frontend.async_engine import AsyncEngine
from inference_svc.frontend.output_stream import UNREAD_BYTES, Delta, Generation
from inference_svc.results.base import Wanted, of_kind
from inference_svc.results.logprobs import TokenLogprobs
from inference_svc.results.routed_experts import ExpertsOption
from inference_svc.results.scores import OBJECT_BYTES
from servicekit.errors import Draining, ShareExceeded
from servicekit.shares import Shares
from tests.support.inference.async_engines import collect, make_async_engine, make_request, run
from tests.support.inference.results import wanted_of
from tests.support.wait import until_async

DIGEST = "sha256:" + "a" * 64


def test_experts_of_a_prompt_are_reserved_before_it_runs(engine, tokenizers) -> None:
    """They come at once: what the account's share does not hold is refused, not computed."""
    tokenizer = tokenizers["byte_level"]
    wanted = Wanted((ExpertsOption(token_bytes=100),))
    request = replace(make_request(tokenizer, "abc"), wanted=wanted)
    num_tokens = len(request.prompt_token_ids)

    async def body() -> None:
        shares = Shares("unread_bytes", UNREAD_BYTES + 100 * num_tokens)
        async_engine = AsyncEngine(engine, tokenizer, shares)
        async_engine.start()
        with shares.reserve("other", 1), pytest.raises(ShareExceeded):
            await anext(async_engine.generate(request))
        assert not engine.submitted
        async with aclosing(async_engine.generate(request)) as generating:
            await anext(generating)
            assert shares.used == shares.capacity, "also while it is being sent"
        assert shares.used == 0

    run(body)


def test_scores_of_a_prompt_are_reserved_before_it_runs(engine, tokenizers) -> None:
    """So many that the account's share does not hold them are refused, not computed."""
    tokenizer = tokenizers["byte_level"]
    made = make_request(tokenizer, "abc")
    num_tokens = len(made.prompt_token_ids)

    async def body() -> None:
        shares = Shares("unread_bytes", UNREAD_BYTES + OBJECT_BYTES + (12 + 8 * 9) * num_tokens)
        async_engine = AsyncEngine(engine, tokenizer, shares)
        async_engine.start()
        for top_k, is_refused in ((10, True), (9, False)):
            request = replace(made, wanted=wanted_of(prompt_logprobs=top_k))
            async with aclosing(async_engine.generate(request)) as generating:
                if is_refused:
                    with pytest.raises(ShareExceeded):
                        await anext(generating)
                    assert not engine.submitted
                else:
                    await anext(generating)
                    assert shares.used == shares.capacity
        assert shares.used == 0

    run(body)


@pytest.mark.parametrize("num_top", [20, 1024])
def test_what_is_not_read_takes_its_accounts_share(tokenizers, num_top: int) -> None:
    """And ends at it: of 8 answers' least size an account may have half."""
    from inference_svc.engine.transport.messages import Output

    tokenizer = tokenizers["byte_level"]
    token_id = tokenizer.encode("a")[0]
    logprobs = (TokenLogprobs.of(token_id, -1.0, [token_id] * num_top, [-1.0] * num_top),)
    shares = Shares("unread_bytes", 8 * UNREAD_BYTES, 0.5)

    async def body() -> int:
        with shares.reserve("a", UNREAD_BYTES) as place:
            generation = Generation(make_request(tokenizer, "abc"), tokenizer, place)
            output = Output("r", (token_id,), logprobs)
            assert not generation.push(output)
            await generation.next_delta()
            assert shares.used == UNREAD_BYTES  # a reader that keeps up takes no more
            num_pushed = 1
            while not generation.push(output):
                num_pushed += 1
            assert shares.used_by("a") == 4 * UNREAD_BYTES
            with pytest.raises(ShareExceeded):
                await generation.next_delta()
        assert shares.used == 0
        return num_pushed

    num_bytes = 64 + 320 + 8 * num_top
    assert run(body) == 4 * UNREAD_BYTES // num_bytes


def test_withheld_logprobs_take_their_accounts_share_though_deltas_are_read(tokenizers) -> None:
    """Of tokens whose text may change: a run of bytes is valid or invalid as one."""
    from inference_svc.engine.transport.messages import Output

    tokenizer = tokenizers["unigram"]
    token_id = min(tokenizer.byte_ids)
    shares = Shares("unread_bytes", 8 * UNREAD_BYTES, 0.5)
    output = Output("r", (token_id,), (TokenLogprobs(token_id, -1.0),))

    async def body(num_tokens: int, ends: bool) -> list[Delta]:
        deltas = []
        with shares.reserve("a", UNREAD_BYTES) as place:
            request = make_request(tokenizer, "abc")
            generation = Generation(request, tokenizer, place, withholds_parts=True)
            for _ in range(num_tokens):
                if generation.push(output):
                    break
                deltas.append(await generation.next_delta())
            if ends:
                generation.push(Output("r", finish_reason=FinishReason.LENGTH))
            deltas.append(await generation.next_delta())
        assert shares.used == 0
        return deltas

    *early, last = run(lambda: body(20, ends=True))
    assert not any(delta.parts for delta in early)
    assert len(last.parts) == 20
    with pytest.raises(ShareExceeded):
        run(lambda: body(4 * UNREAD_BYTES // 320 + 1, ends=False))


def test_closing_the_stream_cancels_and_frees_the_id(engine, tokenizers) -> None:
    tokenizer = tokenizers["chars"]

    async def body() -> None:
        async_engine = make_async_engine(engine, tokenizer)
        request = make_request(tokenizer, "abc", ignore_eos=True, max_tokens=10**6)
        for _ in range(2):
            async with aclosing(async_engine.generate(request)) as deltas:
                async for _delta in deltas:
                    break
        await until_async(lambda: engine.num_running == 0 and len(engine.cancelled) == 2)

    run(body)


def test_cancelling_the_reading_task_cancels_the_request(engine, tokenizers) -> None:
    tokenizer = tokenizers["chars"]

    async def body() -> None:
        async_engine = make_async_engine(engine, tokenizer)
        engine.hold.set()
        task = asyncio.create_task(collect(async_engine, make_request(tokenizer, "abc")))
        await until_async(lambda: engine.num_running == 1)
        task.cancel()
        await until_async(lambda: engine.num_running == 0)
        with pytest.raises(asyncio.CancelledError):
            await task

    run(body)


def test_running_id_is_refused(engine, tokenizers) -> None:
    tokenizer = tokenizers["chars"]

    async def body() -> None:
        async_engine = make_async_engine(engine, tokenizer)
        engine.hold.set()
        first = asyncio.create_task(collect(async_engine, make_request(tokenizer, "abc", "same")))
        await until_async(lambda: engine.num_running == 1)
        with pytest.raises(DuplicateRequest, match="same"):
            await collect(async_engine, make_request(tokenizer, "abc", "same"))
        engine.hold.clear()
        assert "".join(d.text for d in await first) == "abc"
        await collect(async_engine, make_request(tokenizer, "abc", "same"))

    run(body)


def test_ids_of_tenants_are_separate(engine, tokenizers) -> None:
    tokenizer = tokenizers["chars"]

    async def body() -> None:
        async_engine = make_async_engine(engine, tokenizer)
        engine.hold.set()
        request = make_request(tokenizer, "abc", "same")
        both = [asyncio.create_task(collect(async_engine, request, tenant)) for tenant in "ab"]
        await until_async(lambda: engine.num_running == 2)
        with pytest.raises(DuplicateRequest):
            await collect(async_engine, request, "b")
        engine.hold.clear()
        for deltas in await asyncio.gather(*both):
            assert "".join(d.text for d in deltas) == "abc"

    run(body)


def test_slow_reader_gets_one_delta_for_many_steps(engine, tokenizers) -> None:
    tokenizer = tokenizers["chars"]
    text = "the quick brown fox jumps over the lazy dog"

    async def body() -> None:
        async_engine = make_async_engine(engine, tokenizer)
        deltas = []
        async with aclosing(
            async_engine.generate(make_request(tokenizer, text, logprobs=1))
        ) as stream:
            async for delta in stream:
                deltas.append(delta)
                await until_async(lambda: engine.num_running == 0)
        assert len(deltas) <= 2
        assert "".join(d.text for d in deltas) == text
        logprobs = [entry.token_id for d in deltas for entry in of_kind(d.parts, TokenLogprobs)]
        assert logprobs == [i for d in deltas for i in d.token_ids]

    run(body)


def test_a_request_ends_whose_reader_leaves_too_much(engine, tokenizers) -> None:
    """The engine is told so while the reader does not read; what was kept is let go."""
    tokenizer = tokenizers["chars"]
    shares = Shares("unread_bytes", 2 * UNREAD_BYTES)

    async def body() -> None:
        async_engine = AsyncEngine(engine, tokenizer, shares)
        async_engine.start()
        request = make_request(tokenizer, "abc" * 10, ignore_eos=True, max_tokens=10**6)
        async with aclosing(async_engine.generate(request, account="a")) as deltas:
            await anext(deltas)
            await until_async(lambda: bool(engine.cancelled))
            with pytest.raises(ShareExceeded):
                await anext(deltas)
        assert shares.used == 0
        assert await collect(async_engine, make_request(tokenizer, "abc"))

    run(body)


def test_engine_errors_reach_the_reader(engine, tokenizers) -> None:
    engine.errors[DIGEST] = AdapterUnavailable("not resident after 10 s", subject="adapter")

    async def body() -> None:
        async_engine = make_async_engine(engine, tokenizers["chars"])
        request = replace(make_request(tokenizers["chars"], "abc"), key=DIGEST)
        with pytest.raises(AdapterUnavailable, match="after 10 s"):
            await collect(async_engine, request)
        assert not engine.cancelled

    run(body)


def test_commands_get_their_own_reply(engine, tokenizers) -> None:
    async def body() -> None:
        async_engine = make_async_engine(engine, tokenizers["chars"])
        status, adapter = await asyncio.gather(
            async_engine.calls.describe(), async_engine.calls.load(DIGEST, True)
        )
        assert status.num_waiting == 7
        assert adapter.pinned
        assert await async_engine.calls.list_resident() == (adapter,)
        assert await async_engine.calls.unload(DIGEST) == adapter.num_bytes

    run(body)


def test_drain_refuses_new_requests_and_finishes_running_ones(engine, tokenizers) -> None:
    tokenizer = tokenizers["chars"]

    async def body() -> None:
        async_engine = make_async_engine(engine, tokenizer)
        engine.hold.set()
        running = asyncio.create_task(collect(async_engine, make_request(tokenizer, "abc")))
        await until_async(lambda: engine.num_running == 1)
        draining = asyncio.create_task(async_engine.drain(10))
        await asyncio.sleep(0)
        with pytest.raises(Draining):
            await collect(async_engine, make_request(tokenizer, "abc", "new"))
        assert not draining.done()
        engine.hold.clear()
        await draining
        assert (await running)[-1].finish_reason is FinishReason.STOP

    run(body)


def test_requests_end_after_the_grace(engine, tokenizers) -> None:
    tokenizer = tokenizers["chars"]

    async def body() -> None:
        async_engine = make_async_engine(engine, tokenizer)
        request = make_request(tokenizer, "abc", ignore_eos=True, max_tokens=10**6)
        running = asyncio.create_task(collect(async_engine, request))
        await until_async(lambda: engine.num_running == 1)
        await async_engine.drain(0.05)
        with pytest.raises(Draining):
            await running
        await until_async(lambda: engine.num_running == 0)

    run(body)


def test_engine_failure_ends_all_requests(engine, tokenizers) -> None:
    tokenizer = tokenizers["chars"]

    async def body() -> None:
        async_engine = make_async_engine(engine, tokenizer)
        engine.hold.set()
        running = asyncio.create_task(collect(async_engine, make_request(tokenizer, "abc")))
        await until_async(lambda: engine.num_running == 1)
        engine.fail.set()
        with pytest.raises(EngineFailed):
            await running
        assert async_engine.failed.is_set()
        with pytest.raises(Draining, match="the engine failed"):  # another server may take it
            await collect(async_engine, make_request(tokenizer, "abc", "new"))
        for call in (async_engine.calls.load("digest", pin=False), async_engine.calls.describe()):
            with pytest.raises(Draining, match="the engine failed"):
                await call

    run(body)


class ScriptedEngine:
    """Records its messages, and sends the outputs of a test."""

    def start(self, on_outputs: Callable[[StepOutputs], None]) -> None:
        self.emit, self.received = on_outputs, []

    def send(self, message: Any) -> None:
        self.received.append(message)


@pytest.mark.parametrize("cancelled", ["before the reply", "with the reply", "never"])
def test_trace_of_a_cancelled_caller_is_removed(tokenizers, tmp_path, cancelled) -> None:
    path = tmp_path / "trace"
    path.touch()

    async def body() -> None:
        engine, loop = ScriptedEngine(), asyncio.get_running_loop()
        async_engine = make_async_engine(engine, tokenizers["chars"])
        profiling = asyncio.create_task(async_engine.calls.profile(1, 1.0))
        await until_async(lambda: bool(engine.received))
        reply = Reply(engine.received[0].call_id, StepTrace(str(path), 1))
        if cancelled == "before the reply":
            loop.call_soon(profiling.cancel)
        engine.emit(StepOutputs((), (reply,)))  # dispatched in the loop's next turn
        if cancelled == "with the reply":
            loop.call_soon(profiling.cancel)
        if cancelled == "never":
            (await profiling).remove()
        else:
            with pytest.raises(asyncio.CancelledError):
                await profiling
        assert not path.exists()
        assert len(engine.received) == 1, "there is nothing to abandon"

    run(body)


def test_concurrent_requests_do_not_mix(engine, tokenizers) -> None:
    tokenizer = tokenizers["chars"]
    texts = [f"{word} {i}" for i, word in enumerate(["fox", "dog", "quick", "lazy"] * 10)]

    async def body() -> None:
        async_engine = make_async_engine(engine, tokenizer)
        results = await asyncio.gather(
            *(collect(async_engine, make_request(tokenizer, t, f"r{t}")) for t in texts)
        )
        assert ["".join(d.text for d in deltas) for deltas in results] == texts

    run(body)


def test_decoding_error_ends_one_request_only(engine, tokenizers) -> None:
    tokenizer = tokenizers["chars"]
    poison = tokenizer.encode("q")[0]

    class Breaking:
        visible_ids, byte_ids = tokenizer.visible_ids, tokenizer.byte_ids

        def decode(self, token_ids: list[int]) -> str:
            if poison in token_ids:
                raise ValueError("no such text")
            return tokenizer.decode(token_ids)

    async def body() -> None:
        async_engine = make_async_engine(engine, Breaking())
        engine.hold.set()  # so that all run in the same steps
        bad = [
            asyncio.create_task(collect(async_engine, make_request(tokenizer, "aqa", f"bad{i}")))
            for i in range(2)
        ]
        good = asyncio.create_task(collect(async_engine, make_request(tokenizer, "abc", "good")))
        await until_async(lambda: engine.num_running == 3)
        engine.hold.clear()
        for task in bad:
            with pytest.raises(ValueError, match="no such text"):
                await task
        assert "".join(d.text for d in await good) == "abc"
        await until_async(lambda: engine.num_running == 0)

    run(body)
