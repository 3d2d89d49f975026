"""The text of a stream: whole characters, stop tokens and stop strings, one version a delta."""

import pytest

from inference_svc.core import FinishReason
from inference_svc.frontend.output_stream import UNREAD_BYTES, Delta, Generation
from inference_svc.results.base import of_kind
from inference_svc.results.logprobs import TokenLogprobs
from servicekit.shares import Shares
from tests.support.inference.async_engines import collect, make_async_engine, make_request, run
from tests.support.wait import until_async


@pytest.mark.parametrize("kind", ["byte_level", "unigram", "chars"])
def test_text_is_complete_and_without_the_end_token(engine, tokenizers, kind) -> None:
    text = "the quick 日本 fox" if kind == "chars" else "the quick 😀 fox, 日本語"

    async def body() -> None:
        async_engine = make_async_engine(engine, tokenizers[kind])
        request = make_request(tokenizers[kind], text)
        deltas = await collect(async_engine, request)
        assert "".join(d.text for d in deltas) == text
        token_ids = [i for d in deltas for i in d.token_ids]
        assert token_ids == [*request.prompt_token_ids, 1]
        assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
        last = deltas[-1]
        assert last.finish_reason is FinishReason.STOP
        assert last.usage is not None
        assert last.usage.completion_tokens == len(token_ids)
        assert last.usage.cached_prompt_tokens == 2
        assert last.timings is not None
        assert not engine.cancelled

    run(body)


def test_stop_token_is_not_part_of_the_text(engine, tokenizers) -> None:
    """Even when it is not a special token: the engine stopped at it."""
    tokenizer = tokenizers["byte_level"]
    deltas = []

    async def body() -> None:
        from inference_svc.engine.transport.messages import Output, Usage

        request = make_request(tokenizer, "abc")
        place = Shares("unread_bytes", 64 << 20).reserve("a", UNREAD_BYTES)
        generation = Generation(request, tokenizer, place)
        a, b = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
        generation.push(Output("r", (a,)))
        generation.push(Output("r", (b,), finish_reason=FinishReason.STOP, usage=Usage(3, 0, 2)))
        deltas.append(await generation.next_delta())

    run(body)
    (delta,) = deltas
    assert delta.text == "a"
    assert delta.token_ids == [*tokenizer.encode("a"), *tokenizer.encode("b")]


def test_a_delta_has_tokens_of_one_version(engine, tokenizers) -> None:
    """However late it is read; and what is not read yet takes its account's share."""
    from inference_svc.core import AdapterVersion
    from inference_svc.engine.transport.messages import Output

    tokenizer = tokenizers["byte_level"]
    (token_id,) = tokenizer.encode("a")
    first, second = AdapterVersion("a@1", "one"), AdapterVersion("a@2", "two", 4)
    made_by = [None, None, first, first, second, first]

    async def body() -> list[Delta]:
        shares = Shares("unread_bytes", 64 << 20)
        place = shares.reserve("a", UNREAD_BYTES)
        generation = Generation(make_request(tokenizer, "abc"), tokenizer, place)
        for version in made_by:
            generation.push(Output("r", (token_id,), version=version))
        last = Output("r", finish_reason=FinishReason.LENGTH, version=first)
        generation.push(last)
        return [await generation.next_delta() for _ in range(4)]

    deltas = run(body)
    assert [(each.version, len(each.token_ids)) for each in deltas] == [
        (None, 2),
        (first, 2),
        (second, 1),
        (first, 1),
    ]
    assert [each.finish_reason for each in deltas] == [None, None, None, FinishReason.LENGTH]
    assert "".join(each.text for each in deltas) == "a" * len(made_by)


@pytest.mark.parametrize(("stop", "num_shown"), [(" the", 2), ("he", 3), ("è", 0)])
def test_a_stop_string_after_bytes_has_no_logprobs(tokenizers, stop: str, num_shown: int) -> None:
    """The text of the bytes is certain with the token after them, and each has its own place."""
    from inference_svc.engine.transport.messages import Output

    tokenizer = tokenizers["unigram"]
    token_ids = list(map(tokenizer.backend.token_to_id, ("<0xC3>", "<0xA8>", "▁the")))

    async def body() -> Delta:
        with Shares("unread_bytes", 8 * UNREAD_BYTES, 0.5).reserve("a", UNREAD_BYTES) as place:
            request = make_request(tokenizer, "abc", stop=(stop,))
            generation = Generation(request, tokenizer, place, withholds_parts=True)
            for token_id in token_ids:
                generation.push(Output("r", (token_id,), (TokenLogprobs(token_id, -1.0),)))
            generation.push(Output("r", finish_reason=FinishReason.LENGTH))
            return await generation.next_delta()

    delta = run(body)
    assert delta.text == "è the".partition(stop)[0]
    assert [each.token_id for each in of_kind(delta.parts, TokenLogprobs)] == token_ids[:num_shown]


def test_stop_string_across_tokens_cancels_the_request(engine, tokenizers) -> None:
    tokenizer = tokenizers["chars"]

    async def body() -> None:
        async_engine = make_async_engine(engine, tokenizer)
        request = make_request(
            tokenizer, "the lazy dog", stop=("zy d",), ignore_eos=True, max_tokens=10**6
        )
        deltas = await collect(async_engine, request)
        assert "".join(d.text for d in deltas) == "the la"
        last = deltas[-1]
        assert last.finish_reason is FinishReason.STOP
        assert last.usage is not None
        assert last.usage.completion_tokens == len("the lazy d")
        assert sum(len(d.token_ids) for d in deltas) == len("the lazy d")
        assert len(engine.cancelled) == 1
        await until_async(lambda: engine.num_running == 0)

    run(body)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<s>42<s></ans<s>wer> so", "42"),
        ("42<s></answer><s>", "42"),
        ("</ans<s>wers> so<s> </answe", "</answers> so </answe"),
        ("<s></answer>", ""),
    ],
)
def test_special_tokens_split_no_stop_string(engine, tokenizers, text: str, expected: str) -> None:
    """vllm#45636: they are not part of the text, and nothing of it is lost."""
    tokenizer = tokenizers["byte_level"]

    async def body() -> list[Delta]:
        async_engine = make_async_engine(engine, tokenizer)
        return await collect(async_engine, make_request(tokenizer, text, stop=("</answer>",)))

    deltas = run(body)
    assert "".join(delta.text for delta in deltas) == expected
    assert deltas[-1].finish_reason is FinishReason.STOP


def test_stop_string_waits_for_min_tokens(engine, tokenizers) -> None:
    tokenizer = tokenizers["chars"]

    async def body() -> str:
        async_engine = make_async_engine(engine, tokenizer)
        request = make_request(tokenizer, "ab ab ab", stop=("ab",), min_tokens=3)
        return "".join(d.text for d in await collect(async_engine, request))

    assert run(body) == "ab "


def test_stop_string_on_the_very_last_token(engine, tokenizers) -> None:
    tokenizer = tokenizers["chars"]

    async def body() -> None:
        async_engine = make_async_engine(engine, tokenizer)
        request = make_request(tokenizer, "abcdef", stop=("cd",), max_tokens=4)
        deltas = await collect(async_engine, request)
        assert "".join(d.text for d in deltas) == "ab"
        assert deltas[-1].finish_reason is FinishReason.STOP

    run(body)


def test_held_back_text_is_in_the_last_delta(engine, tokenizers) -> None:
    tokenizer = tokenizers["chars"]

    async def body() -> None:
        async_engine = make_async_engine(engine, tokenizer)
        deltas = await collect(async_engine, make_request(tokenizer, "abc", stop=("cde",)))
        assert "".join(d.text for d in deltas) == "abc"

    run(body)
