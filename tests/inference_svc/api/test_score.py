"""The prompts of a call to score: made one by one, of texts that can fit."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from inference_svc.api.generate_call import GenerateCall
from inference_svc.api.grpc.pooling import IncomingPoolCall, from_score_request
from inference_svc.api.pooling.call import NOTHING_GENERATED
from inference_svc.api.pooling.score import Questions, with_answer_tokens
from inference_svc.pictures.placeholders import PictureRule
from inference_svc.pictures.processor import HALF, Form, Processor
from inference_svc.pictures.sizes import TileForm
from inference_svc.results.base import Wanted
from inference_svc.results.chosen_logits import ChosenLogitsOption
from inference_svc.text.cut import Kept
from inference_svc.text.prompt import PromptEncoder
from loadout.inference.v1 import inference_pb2 as pb
from servicekit.errors import InvalidArgument
from servicekit.rpc.requests import INLINE_ENTRIES
from servicekit.work_budget import WorkBudget

GENERATES: Any = SimpleNamespace(generates=True)


def test_the_query_is_not_copied_for_each_document() -> None:
    request = pb.ScoreRequest(query="q" * 1_000_000, documents=["d"] * 2048)
    tracemalloc.start()
    try:
        call = from_score_request(request, facts=GENERATES)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4_000_000
    assert len(call.prompts) == 2048
    assert "<Query>: qqq" in call.prompts[2047].messages[1].content


@pytest.mark.parametrize(
    ("query", "document", "subject"),
    [("q" * 11, "d", "query"), ("q", "d" * 11, "documents[1]")],
)
def test_a_text_longer_than_the_context_is_refused(query: str, document: str, subject: str) -> None:
    questions = Questions("", ((query, "d"), (query, document)), ("query", "documents"))
    questions.check_lengths(11)
    with pytest.raises(InvalidArgument, match="11 characters") as caught:
        questions.check_lengths(10)
    assert caught.value.subject == subject
    assert "is cut" not in str(caught.value)


def test_the_limit_of_a_document_that_is_cut_is_a_multiple_of_the_context() -> None:
    for query, document, words in (
        ("q", "d" * 80, ""),
        ("q", "d" * 81, r"documents\[0\] has 81 characters; no longer text is cut than of 80:"),
        ("q" * 11, "d", "query has 11 characters; this model's context holds at most 10:"),
    ):
        pairs = ((query, document),)
        questions = Questions("", pairs, ("query", "documents"), kept=Kept.FIRST)
        if not words:
            questions.check_lengths(10)
            continue
        with pytest.raises(InvalidArgument, match=words):
            questions.check_lengths(10)


@pytest.mark.parametrize("kept", [None, Kept.FIRST])
@pytest.mark.parametrize("subject", ["instruction", "query", "documents[1]", ""])
def test_texts_that_are_judged_show_no_images(subject: str, kept: Kept | None) -> None:
    """The advice is not to send images as parts of a chat: this call has none."""
    texts = {"instruction": "i", "query": "q", "documents[1]": "d"}
    if subject:
        texts[subject] += "<image>"
    pairs = ((texts["query"], "d"), (texts["query"], texts["documents[1]"]))
    questions = Questions(texts["instruction"], pairs, ("query", "documents"), kept)
    processor = Processor(Form.WHOLE, 8, 3, HALF, HALF)
    names = {"<image>": 9, "yes": 7, "no": 8}
    encoder: Any = SimpleNamespace(
        max_chars_per_token=9,
        encode=lambda text, add_special_tokens: [names[text]],
        name_of=lambda token_id: "<image>" if token_id == 9 else "",
    )
    call: Any = GenerateCall(
        request_id="r",
        adapter="",
        prompts=questions,
        sampling=NOTHING_GENERATED,
        wanted=Wanted((ChosenLogitsOption(("no", "yes")),)),
    )
    rule = PictureRule(processor, 9, TileForm(8, 4), 2)
    prompts = PromptEncoder(encoder, 100, 10, WorkBudget("work", 1.0), picture_rule=rule)
    try:
        if not subject:
            with_answer_tokens(call, encoder, prompts, None)
            return
        with pytest.raises(
            InvalidArgument, match="'<image>', which stands for an image: leave"
        ) as caught:
            with_answer_tokens(call, encoder, prompts, None)
        assert caught.value.subject == subject
    finally:
        prompts.close()


@pytest.mark.parametrize("num_entries", [INLINE_ENTRIES, INLINE_ENTRIES + 1])
def test_many_characters_are_converted_by_a_parser(num_entries: int) -> None:
    """A document counts as one more than it has."""
    threads: list[str] = []

    def watched(*args: Any) -> GenerateCall:
        threads.append(threading.current_thread().name)
        return from_score_request(*args, facts=GENERATES)

    request = pb.ScoreRequest(query="q" * (num_entries - 3), documents=["dd"])
    context: Any = SimpleNamespace(time_remaining=lambda: None)

    async def main() -> GenerateCall:
        with ThreadPoolExecutor(1, thread_name_prefix="parser") as parsers:
            incoming = IncomingPoolCall(request, context, watched)
            return await incoming.read(parsers)

    assert len(asyncio.run(main()).prompts) == 1
    assert threads[0].startswith("parser") == (num_entries > INLINE_ENTRIES)


@pytest.mark.parametrize(
    ("yes_id", "num_added", "subject"),
    [(9, None, ""), (10, None, "model"), (10, 0, "adapter"), (11, 2, ""), (12, 2, "adapter")],
)
def test_answers_have_logits(yes_id: int, num_added: int | None, subject: str) -> None:
    """Their tokens are the model's, which has 10, or added by the adapter."""
    encoder: Any = SimpleNamespace(
        max_chars_per_token=4,
        encode=lambda text, add_special_tokens: [yes_id if text == "yes" else 3],
    )
    binding: Any = None if num_added is None else SimpleNamespace(added_tokens=num_added)
    call = from_score_request(pb.ScoreRequest(query="q", documents=["d"]), facts=GENERATES)
    prompts = PromptEncoder(encoder, 100, 10, WorkBudget("work", 1.0))
    try:
        if subject:
            with pytest.raises(InvalidArgument, match=f"token {yes_id} for 'yes'") as caught:
                with_answer_tokens(call, encoder, prompts, binding)
            assert caught.value.subject == subject
        else:
            option = with_answer_tokens(call, encoder, prompts, binding).wanted.get(
                ChosenLogitsOption
            )
            assert option is not None
            assert option.token_ids == (3, yes_id)
    finally:
        prompts.close()
