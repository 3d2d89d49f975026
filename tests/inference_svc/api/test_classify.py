"""The memory that results of a classifier are expected to take, before it computes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from inference_svc.api.pooling.classify import ClassifyCall, with_head
from inference_svc.results.base import FP32_BYTES, OBJECT_BYTES
from inference_svc.results.classifier_rule import MAX_LABELS, ClassifierRule
from inference_svc.store.adapter_resolver import Binding

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
