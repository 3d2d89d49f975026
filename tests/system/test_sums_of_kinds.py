"""Requests that run with sums of adapters that scale or replace what the base has: the same logits
and tokens as transformers' of the base's weights and what each adapter changes of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from inference_svc.errors import AdapterUnusable
from tests.support.models.parity import prompts, relative_rms
from tests.support.models.zoo import VOCAB
from tests.support.pairs import PATHS
from tests.system.kinds import ADDED, TOKENS, Kinds, begin, make_kinds
from tests.system.sums import SUMS, Parts, check_sum, digest_of, summed


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Kinds:
    return make_kinds("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.mark.parametrize("path", PATHS)
def test_sums_have_the_oracles_logits(zoo: Kinds, path: str, start: Callable) -> None:
    """In one batch with each other, the base model and their parts alone."""
    running, recorder = begin(zoo, start, native_kernels=PATHS[path], max_prefill_chunk=24)
    asked = dict(zip(SUMS, prompts(len(SUMS), seed=3), strict=True))
    asked["tokens that one adds"] += ADDED
    for name, prompt in asked.items():
        running.submit(name, prompt, digest_of(running, SUMS[name]))
    for index, adapter in enumerate(("", "dora", "head", "bias=all")):
        zoo.submit(running, f"alone {index}", [5, 6, 7 + index], adapter)
    for name, prompt in asked.items():
        check_sum(summed(zoo, SUMS[name]), prompt, running, name, recorder.logits)
    for index, adapter in enumerate(("", "dora", "head", "bias=all")):
        tokens, _ = running.result(f"alone {index}")
        assert tokens == zoo.of(adapter).greedy(adapter, [5, 6, 7 + index], 64, guess=tokens)
    running.check_idle()


def test_a_part_changes_what_its_sum_says(zoo: Kinds, start: Callable) -> None:
    """Each of them, or the sums above could be without it."""
    running, recorder = begin(zoo, start, native_kernels=True)
    for name, parts in SUMS.items():
        for kept in (parts, *(parts[:i] + parts[i + 1 :] for i in range(len(parts)))):
            key = f"{name}: {kept}"
            running.submit(key, [0, 3, 9, 50], digest_of(running, kept), max_tokens=1)
            assert running.result(key)[1].error is None
        whole, *others = (recorder.logits[key][0] for key in recorder.logits if name in key)
        for other in others:
            assert relative_rms(other[:VOCAB], whole[:VOCAB]) > 1e-3, name


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ((("plain", 1.0), ("dora", 0.5)), "scales or replaces .* give it the scale 1, not 0.5"),
        ((("rows", 2.0),), r"model\.embed_tokens: give it the scale 1, not 2"),
        ((("head", 1.0), ("dora and the head", 1.0)), "both scale or replace .* lm_head"),
        ((("embedding", 1.0), ("rows", 1.0)), r"both scale or replace .* model\.embed_tokens"),
        ((("dora", 1.0), ("bias=all", 1.0)), "both scale or replace"),
        ((("embedding", 1.0), (TOKENS, 1.0)), r"both scale or replace .* model\.embed_tokens"),
        ((("rows", 1.0), ("dora of both ends", 1.0)), r"both scale or replace .*embed_tokens"),
        (((TOKENS, 1.0), ("lookup", 0.5)), "cannot be summed with .*--max-added-tokens"),
    ],
    ids=str,
)
def test_two_that_change_one_target_are_refused(
    zoo: Kinds, start: Callable, parts: Parts, match: str
) -> None:
    running = start(zoo, max_added_tokens=len(ADDED))
    running.submit("a", [5], digest_of(running, parts), max_tokens=1)
    error = running.result("a")[1].error
    assert isinstance(error, AdapterUnusable)
    assert running.digests[parts[-1][0]] in str(error)
    with pytest.raises(AdapterUnusable, match=match):
        raise error
    running.check_idle()
