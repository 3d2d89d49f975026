"""The memory that results of a classifier are expected to take before it computes them, and the
turns that large results take."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inference_svc.api.http.pooling.embeddings import encoded
from inference_svc.api.pooling.call import SLICE_NUMBERS, of_tokens
from inference_svc.api.pooling.classify import ClassifyCall, with_head
from inference_svc.api.pooling.score import ScoreCall
from inference_svc.results.base import FP32_BYTES, OBJECT_BYTES
from inference_svc.results.class_logits import ClassLogitsOption
from inference_svc.results.classifier_rule import MAX_LABELS, Activation, ClassifierRule
from inference_svc.store.adapter_resolver import Binding
from servicekit.errors import InvalidArgument

NAMES = ("a", "b", "c", "d", "e")


def binding(**fields: Any) -> Binding:
    return Binding("t/n@1", "t", "sha256:0", 8, **fields)


NAMED = binding(has_head=True, class_labels=NAMES)


@pytest.mark.parametrize(
    ("labels", "bound", "num_labels"),
    [
        (("x", "y"), None, 2),
        (("x", "y"), binding(), 2),
        (("x", "y"), NAMED, 5),
        ((), NAMED, 5),
        (("x", "y"), binding(has_head=True), MAX_LABELS),
        (("x", "y"), Binding.of_parts([(NAMED, 1.0), (binding(), 1.0)]), MAX_LABELS),
    ],
    ids=["the model's", "a plain adapter", "its own", "its own alone", "unnamed", "a sum"],
)
def test_labels_of_tokens_are_reserved_for_the_head_that_computes_them(
    labels: tuple[str, ...], bound: Binding | None, num_labels: int
) -> None:
    """An adapter's head may have more labels than the model's."""
    server: Any = SimpleNamespace(
        classifier=ClassifierRule(labels, per_token=True), base_model="base"
    )
    call = ClassifyCall(
        request_id="r", adapter="" if bound is None else "n", inputs=((1, 2),), per_token=True
    ).to_call(server.classifier)
    served = with_head(call, bound, server).wanted.served_by(server)
    assert served.prompt_bytes(10) == OBJECT_BYTES + FP32_BYTES * num_labels * 10


@pytest.mark.parametrize(
    ("labels", "bound", "refused"),
    [
        (("x", "y"), None, "base"),
        (("x", "y"), binding(), "base"),
        (("x", "y"), binding(has_head=True, class_labels=("a",)), ""),
        (("x",), NAMED, "t/n@1"),
        (("x",), None, ""),
        ((), binding(has_head=True, class_labels=("a",)), ""),
    ],
    ids=["the model's", "a plain adapter's", "its own", "its own labels", "one", "its own alone"],
)
def test_a_head_of_one_output_scores(
    labels: tuple[str, ...], bound: Binding | None, refused: str
) -> None:
    """An adapter's own may, on a model that has several labels."""
    server: Any = SimpleNamespace(
        classifier=ClassifierRule(labels), base_model="base", generates=False
    )
    call = ScoreCall(request_id="r", adapter="n", pairs=(("q", "d"),)).to_call(
        server, generates=False
    )
    option = call.wanted.served_by(server)
    call = replace(call, wanted=option)
    if not refused:
        assert with_head(call, bound, server).wanted.get(ClassLogitsOption)
        return
    with pytest.raises(InvalidArgument, match=f"^{refused} does not score: its head has") as caught:
        with_head(call, bound, server)
    assert caught.value.subject == ("model" if refused == "base" else "adapter")


def test_results_of_many_tokens_are_made_in_turns() -> None:
    """Of 32,768 tokens with 1,024 labels each they take a second: others do not wait for it."""
    logits = np.random.default_rng(0).normal(size=(4 * SLICE_NUMBERS // 64 + 1, 64))
    blocks = np.split(logits.astype(np.float32), [1, 700])
    sizes, num_turns = [], 0

    def softmax(rows: NDArray[np.float32]) -> NDArray[np.float32]:
        sizes.append(rows.size)
        return Activation.SOFTMAX(rows)

    async def watch() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    async def main() -> NDArray[np.float32]:
        others = asyncio.create_task(watch())
        try:
            return await of_tokens(blocks, softmax)
        finally:
            others.cancel()

    found = asyncio.run(main())
    np.testing.assert_array_equal(found, Activation.SOFTMAX(np.concatenate(blocks)))
    assert max(sizes) == SLICE_NUMBERS
    assert num_turns >= len(sizes) - 1


@pytest.mark.parametrize("size", [1, 2, (3 << 16) - 1, 3 << 16, (3 << 16) + 1, 1 << 19])
def test_base64_comes_in_small_pieces(size: int) -> None:
    values = np.arange(size, dtype=np.float32)
    pieces = list(encoded(values, is_base64=True))
    text = b"".join(pieces)
    assert (text[:1], text[-1:]) == (b'"', b'"')
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(text[1:-1]), "<f4"), values)
    assert max(map(len, pieces)) <= (1 << 20) + 2
    rows = list(encoded(values.reshape(-1, 1), is_base64=True))
    assert rows == pieces
