"""The results that requests of tests ask for, by the names of the API's fields."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from inference_svc.core import SampledToken, SamplingParams
from inference_svc.engine.transport.messages import Output
from inference_svc.results.base import Option, P, Wanted, of_kind
from inference_svc.results.logprobs import LogprobsMode, TokenLogprobs
from inference_svc.results.pooling import PoolingOption
from inference_svc.results.routed_experts import ExpertsOption
from inference_svc.results.scores import logprobs_options

NAMES = (
    "logprobs",
    "prompt_logprobs",
    "logprobs_mode",
    "return_routed_experts",
    "embedding",
    "options",
)


def wanted_of(
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    logprobs_mode: LogprobsMode = LogprobsMode.RAW,
    return_routed_experts: bool = False,
    embedding: PoolingOption | None = None,
    options: tuple[Option, ...] = (),
) -> Wanted:
    found = [*options, *logprobs_options(logprobs, prompt_logprobs, logprobs_mode, "")]
    if return_routed_experts:
        found.append(ExpertsOption())
    if embedding is not None:
        found.append(embedding)
    return Wanted(tuple(found))


def asking(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields `sampling` and `wanted` of a request with these options."""
    results = {name: value for name, value in options.items() if name in NAMES}
    others = {name: value for name, value in options.items() if name not in NAMES}
    return {"sampling": SamplingParams(**others), "wanted": wanted_of(**results)}


def parts_of(outputs: Iterable[Output], kind: type[P]) -> list[P]:
    """Returns the parts of one kind of a request's outputs, in order."""
    return [part for output in outputs for part in of_kind(output.parts, kind)]


def logprobs_of(token: SampledToken) -> TokenLogprobs | None:
    """Returns a token's log probabilities, if it has some."""
    found = of_kind(token.parts, TokenLogprobs)
    assert len(found) <= 1
    return found[0] if found else None
