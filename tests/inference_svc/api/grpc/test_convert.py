import math
from typing import Any

import pytest

from inference_svc.api.generate_call import GenerateCall
from inference_svc.api.grpc import convert
from inference_svc.core import FinishReason, SamplingParams, TokenLogprobs
from inference_svc.engine.messages import Timings, Usage
from inference_svc.engine.status_types import ResidentAdapter
from inference_svc.frontend.output_stream import Delta
from inference_svc.store.directory import Binding
from inference_svc.text.prompt import ChatMessage
from loadout.inference.v1 import inference_pb2 as pb
from servicekit.errors import InvalidArgument

VOCAB = 100
NAN, INF = math.nan, math.inf


def call(**fields: Any) -> GenerateCall:
    return convert.from_generate_request(pb.GenerateRequest(**{"text": "x", **fields}), VOCAB)


def test_unset_fields_get_the_contracts_defaults() -> None:
    sampling = call().sampling
    assert sampling == SamplingParams(seed=sampling.seed)
    assert 0 <= sampling.seed < 1 << 64
    assert call().sampling.seed != sampling.seed
    assert call().request_id != call().request_id


def test_every_field_is_converted() -> None:
    params = pb.SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        min_p=0.125,
        seed=(1 << 64) - 1,
        stop=["a", "b"],
        stop_token_ids=[5, 5, 6],
        ignore_eos=True,
        presence_penalty=-1,
        frequency_penalty=1.5,
        repetition_penalty=1.25,
        logprobs=0,
    )
    assert call(sampling=params).sampling == SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        min_p=0.125,
        seed=(1 << 64) - 1,
        stop=("a", "b"),
        stop_token_ids=(5, 6),
        ignore_eos=True,
        presence_penalty=-1,
        frequency_penalty=1.5,
        repetition_penalty=1.25,
        logprobs=0,
    )
    got = call(request_id="id", adapter="a", min_revision=3, priority=-2, cache_salt="s")
    assert (got.request_id, got.adapter, got.min_revision) == ("id", "a", 3)
    assert (got.priority, got.cache_salt, got.prompts) == (-2, "s", ("x",))


def test_zero_is_not_unset() -> None:
    sampling = call(sampling=pb.SamplingParams(temperature=0, seed=0, logprobs=0)).sampling
    assert (sampling.temperature, sampling.seed, sampling.logprobs) == (0, 0, 0)


def test_top_k_of_the_vocabulary_size_is_off() -> None:
    assert call(sampling=pb.SamplingParams(top_k=VOCAB)).sampling.top_k == 0
    assert call(sampling=pb.SamplingParams(top_k=VOCAB - 1)).sampling.top_k == VOCAB - 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("min_tokens", 257),
        *(("temperature", v) for v in (-0.1, 0.001, 101, NAN, INF)),
        *(("top_p", v) for v in (0, -1, 1.01, NAN)),
        *(("min_p", v) for v in (-0.1, 1.1, NAN)),
        *(("presence_penalty", v) for v in (-2.1, 2.1, NAN, INF)),
        *(("frequency_penalty", v) for v in (-2.1, 2.1, NAN)),
        *(("repetition_penalty", v) for v in (0, -1, 101, NAN, INF)),
        ("logprobs", 21),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop", ["x" * 257]),
        ("stop_token_ids", [VOCAB]),
        ("stop_token_ids", [1] * 257),
    ],
)
def test_sampling_out_of_range_names_the_field(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgument) as caught:
        call(sampling=pb.SamplingParams(**{name: value}))
    assert caught.value.subject == f"sampling.{name}"
    assert caught.value.message.startswith(f"sampling.{name} must be")


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty"])
def test_bounds_are_allowed_in_single_precision(name: str) -> None:
    for value in (0.01, 100):
        sampling = call(sampling=pb.SamplingParams(**{name: value})).sampling
        assert getattr(sampling, name) == pytest.approx(value)


def test_request_fields_out_of_range_name_the_field() -> None:
    for field in ("request_id", "cache_salt"):
        with pytest.raises(InvalidArgument) as caught:
            call(**{field: "x" * 257})
        assert caught.value.subject == field


def test_prompts() -> None:
    ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, VOCAB - 1]))
    assert convert.from_generate_request(ids, VOCAB).prompts == ((1, VOCAB - 1),)
    message = pb.ChatMessage(role="user", content="hi")
    chat = pb.GenerateRequest(chat=pb.ChatMessages(messages=[message]))
    assert convert.from_generate_request(chat, VOCAB).prompts == ((ChatMessage("user", "hi"),),)


@pytest.mark.parametrize(
    ("request_", "subject"),
    [
        (pb.GenerateRequest(), "prompt"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[VOCAB])), "token_ids"),
        (pb.GenerateRequest(chat=pb.ChatMessages()), "chat"),
    ],
)
def test_invalid_prompts_name_the_field(request_: pb.GenerateRequest, subject: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        convert.from_generate_request(request_, VOCAB)
    assert caught.value.subject == subject


def test_deadline_is_the_callers() -> None:
    request = pb.GenerateRequest(text="x")
    assert convert.from_generate_request(request, VOCAB, 500.0).deadline_s == 500.0
    assert call().deadline_s is None


def test_responses_carry_every_field() -> None:
    delta = Delta(
        token_ids=[4, 5],
        text="ab",
        logprobs=[TokenLogprobs(4, -0.5, ((4, -0.5), (9, -2.0))), TokenLogprobs(5, -1.0)],
        finish_reason=FinishReason.LENGTH,
        usage=Usage(3, 2, 1),
        timings=Timings(0.5, 0.25, 1.5),
    )
    identity = convert.to_identity(Binding("default/upper@2", "default", "sha256:f", 8))
    response = convert.to_generate_response("r", delta, identity)
    assert (response.request_id, response.text, list(response.token_ids)) == ("r", "ab", [4, 5])
    assert [t.token_id for t in response.logprobs[0].top] == [4, 9]
    assert response.logprobs[1].chosen.logprob == -1.0
    assert response.finish_reason == pb.FINISH_REASON_LENGTH
    usage = response.usage
    assert (usage.prompt_tokens, usage.cached_prompt_tokens, usage.completion_tokens) == (3, 2, 1)
    timings = response.timings
    assert (timings.queued_seconds, timings.adapter_wait_seconds) == (0.5, 0.25)
    assert timings.first_token_seconds == 1.5
    assert (response.adapter.name, response.adapter.digest) == ("default/upper@2", "sha256:f")


def test_optional_fields_stay_unset() -> None:
    response = convert.to_generate_response("r", Delta(token_ids=[4]), convert.to_identity(None))
    assert response.finish_reason == pb.FINISH_REASON_UNSPECIFIED
    for field in ("usage", "timings", "adapter"):
        assert not response.HasField(field)


def test_every_finish_reason_is_converted() -> None:
    for reason in FinishReason:
        response = convert.to_generate_response("r", Delta(finish_reason=reason), None)
        assert pb.FinishReason.Name(response.finish_reason) == f"FINISH_REASON_{reason.name}"


def test_resident_adapters() -> None:
    adapter = ResidentAdapter("sha256:f", "host", 640, 8, True, 2, 1000.5, 0.25)
    got = convert.to_resident_adapter(adapter, ["default/upper"], True)
    assert (got.digest, list(got.names), got.tier) == (
        "sha256:f",
        ["default/upper"],
        pb.ADAPTER_TIER_HOST,
    )
    assert (got.bytes, got.rank, got.pinned, got.running_requests) == (640, 8, True, 2)
    assert (got.last_used_time.ToMilliseconds(), got.load_seconds) == (1_000_500, 0.25)
    assert got.superseded
