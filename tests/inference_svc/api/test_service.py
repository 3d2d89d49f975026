"""The prompts of one call hold up the event loop no longer than one prompt may."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from inference_svc.api.pictures import CallPictures, PictureReader
from inference_svc.api.pooling.embed import EmbedCall
from inference_svc.api.request_record import NO_PROMPT
from inference_svc.api.service import Service
from inference_svc.pictures.uploads import Uploads
from inference_svc.results.embedding_rule import NO_EMBEDDINGS, EmbeddingRule
from inference_svc.results.pooling import PoolingOption
from inference_svc.text.prompt import INLINE_CHARS, MIN_CHARS, PromptEncoder, Text
from servicekit.shares import Shares
from servicekit.work_budget import WorkBudget


def test_texts_keep_white_space_at_both_ends() -> None:
    """As sentence-transformers 6.2 tokenises them: older versions strip texts."""
    call = EmbedCall(
        request_id="a", adapter="", inputs=(Text(" A\n"),), option=PoolingOption(None, None, 0)
    )
    rule = EmbeddingRule(8, prompts={"query": "\nQ: "}, default_prompt="query", lowercases=True)
    assert call.to_call(rule).prompts == (Text("\nq:  a\n"),)


class Watched:
    """Tokens are characters; counts the texts that are tokenised on the event loop, and
    how many are in a row."""

    max_chars_per_token = 1
    renders_in_child = False
    end_ids = ()
    num_inline = in_a_row = most_in_a_row = 0

    def name_of(self, token_id: int) -> str:
        return chr(token_id)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if threading.current_thread() is threading.main_thread():
            self.num_inline += 1
            self.in_a_row += 1
            self.most_in_a_row = max(self.most_in_a_row, self.in_a_row)
        return [ord(char) for char in text]


@pytest.mark.parametrize(
    ("num_chars", "num_inline", "most_in_a_row"),
    [(585, INLINE_CHARS // 585, INLINE_CHARS // 585), (1, 200, INLINE_CHARS // MIN_CHARS + 1)],
    ids=["in a thread", "in turns"],
)
def test_many_texts_of_a_call_leave_the_event_loop(
    num_chars: int, num_inline: int, most_in_a_row: int
) -> None:
    inputs = tuple(Text("x" * num_chars) for _ in range(200))
    call = EmbedCall(
        request_id="a", adapter="", inputs=inputs, option=PoolingOption(None, None, 0)
    ).to_call(NO_EMBEDDINGS)
    encoder: Any = Watched()
    principal: Any = SimpleNamespace(account="a", home_tenant="")
    reader = PictureReader(None, "model", Shares("prompt_image_bytes", 1), Uploads("uploads", 1))

    async def watch() -> None:
        while True:
            encoder.in_a_row = 0
            await asyncio.sleep(0)

    async def main() -> int:
        service: Any = Service.__new__(Service)  # with the parts that prompts need
        vars(service).update(
            _prompts=PromptEncoder(encoder, 1000, 128, WorkBudget("work", 1.0)),
            _pictures=reader,
            _request_log=SimpleNamespace(note_of=lambda prompt: NO_PROMPT),
            facts=SimpleNamespace(max_model_len=1000, vocab_size=128),
        )
        own = CallPictures(reader)
        others = asyncio.create_task(watch())
        try:
            made, notes = await service._to_requests(call, None, principal, encoder, own)
        finally:
            others.cancel()
            service._prompts.close()
        assert len(notes) == len(inputs)
        return len(made)

    assert asyncio.run(main()) == len(inputs)
    assert encoder.num_inline == num_inline
    assert encoder.most_in_a_row <= most_in_a_row
