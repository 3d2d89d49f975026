"""Options of results: their bounds, and the choices that they belong to."""

from __future__ import annotations

import pytest

from inference_svc.results.base import Scope, Wanted, Work
from inference_svc.results.logprobs import MAX_LOGPROBS, LogprobsMode, LogprobsOption
from inference_svc.results.routed_experts import ExpertsOption
from inference_svc.results.scores import ScoresOption, logprobs_options
from servicekit.errors import InvalidArgument


@pytest.mark.parametrize("path", ["", "sampling."])
@pytest.mark.parametrize("top_k", [-1, MAX_LOGPROBS + 1])
def test_most_likely_tokens_out_of_range_name_the_field(top_k: int, path: str) -> None:
    for name, counts in (("logprobs", (top_k, None)), ("prompt_logprobs", (None, top_k))):
        with pytest.raises(InvalidArgument) as caught:
            logprobs_options(*counts, LogprobsMode.RAW, path)
        assert caught.value.subject == f"{path}{name}"
        assert caught.value.message.startswith(f"{path}{name} must be")


def test_an_echoed_prompt_has_as_many_unless_the_caller_says_how_many() -> None:
    mode = LogprobsMode.PROCESSED
    generated = LogprobsOption(3, mode)
    assert logprobs_options(3, None, mode, "", echo=True) == (generated, ScoresOption(3, True))
    assert logprobs_options(3, 5, mode, "", echo=True) == (generated, ScoresOption(5))
    assert logprobs_options(None, None, mode, "", echo=True) == ()


def test_wanted_adds_up_its_options() -> None:
    wanted = Wanted((LogprobsOption(3, LogprobsMode.PROCESSED), ScoresOption(5), ExpertsOption(7)))
    assert wanted.cut_token_work == Work(walks=2, sorts=1, listed=3)
    assert wanted.token_work == Work(walks=2, sorts=0, listed=3)
    assert wanted.prompt_work == Work(walks=1, sorts=0, listed=5)
    assert wanted.num_logprobs(Scope.TOKEN, 10) == 10 * 4
    assert wanted.num_logprobs(Scope.PROMPT, 10) == 9 * 6, "the first token has none"
    assert wanted.prompt_bytes(10) == 1024 + 10 * (12 + 8 * 5) + 10 * 7
    assert wanted.cache_seed == "routed\0"
    later = wanted.without(Scope.PROMPT)
    assert [type(option) for option in later] == [LogprobsOption, ExpertsOption]
    assert later.get(ScoresOption) is None
