import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf.struct_pb2 import Value

from contract.images.segment_kinds import SegmentKind
from contract.images.targets import Target, TargetKind
from inference_svc.adapters.layout import ModelLayout
from inference_svc.api.generate_call import GenerateCall
from inference_svc.api.grpc import convert, results
from inference_svc.api.grpc.bounds import ADAPTER_BYTES
from inference_svc.api.tools import ReadingOptions
from inference_svc.core import FinishReason, Request, SamplingParams
from inference_svc.engine.control.status_types import AdapterDetails, ResidentAdapter
from inference_svc.engine.transport.messages import Timings, Usage
from inference_svc.frontend.output_stream import Delta
from inference_svc.grammars.grammar import MAX_GRAMMAR_BYTES, Grammar
from inference_svc.results.base import Wanted
from inference_svc.results.logprobs import LogprobsOption, PackedLogprobs, TokenLogprobs
from inference_svc.results.routed_experts import RoutedExperts
from inference_svc.store.adapter_resolver import Binding
from inference_svc.text.chat import Chat, ChatMessage, Tool, ToolCall
from inference_svc.text.prompt import Text
from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from loadout.inference.v1 import inference_pb2 as pb
from servicekit.errors import InvalidArgument
from tests.support.inference.results import wanted_of

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


def test_forms_of_answers_are_converted() -> None:
    def grammar(**form: Any) -> Grammar | None:
        return call(sampling=pb.SamplingParams(structure=pb.Structure(**form))).grammar

    path = "sampling.structure."
    cases = {
        Grammar.json_schema('{"type": "null"}', path + "json_schema"): {
            "json_schema": '{"type": "null"}'
        },
        Grammar.json_object(path + "json_object"): {"json_object": True},
        Grammar.regex("a+", path + "regex"): {"regex": "a+"},
        Grammar.choice(["a", "b"], path + "choice"): {"choice": {"texts": ["a", "b"]}},
        Grammar.grammar('start: "a"', path + "grammar"): {"grammar": 'start: "a"'},
    }
    for expected, form in cases.items():
        found = grammar(**form)
        assert found == expected
        assert found is not None
        assert found.field == expected.field
    assert call().grammar is None
    bad: list[tuple[dict[str, Any], str]] = [
        ({}, "sampling.structure"),
        ({"json_object": False}, "sampling.structure"),
        ({"regex": ""}, path + "regex"),
        ({"choice": {}}, path + "choice"),
        ({"choice": {"texts": ["a", ""]}}, path + "choice"),
        ({"json_schema": "x" * (MAX_GRAMMAR_BYTES + 1)}, path + "json_schema"),
    ]
    for form, field in bad:
        with pytest.raises(InvalidArgument) as caught:
            grammar(**form)
        assert caught.value.subject == field


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
    )
    assert call(sampling=params).wanted == wanted_of(logprobs=0)
    got = call(request_id="id", adapter="a", min_revision=3, priority=-2, cache_salt="s")
    assert (got.request_id, got.adapter, got.min_revision) == ("id", "a", 3)
    assert (got.priority, got.cache_salt, got.prompts) == (-2, "s", (Text("x"),))


def test_zero_is_not_unset() -> None:
    made = call(sampling=pb.SamplingParams(temperature=0, seed=0, logprobs=0))
    assert (made.sampling.temperature, made.sampling.seed) == (0, 0)
    assert made.wanted == wanted_of(logprobs=0)


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
    ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, VOCAB]))
    assert convert.from_generate_request(ids, VOCAB).prompts == ((1, VOCAB),), "an adapter's, maybe"
    message = pb.ChatMessage(role="user", content="hi")
    chat = pb.GenerateRequest(chat=pb.ChatMessages(messages=[message]))
    assert convert.from_generate_request(chat, VOCAB).prompts == (
        Chat((ChatMessage("user", "hi"),)),
    )


@pytest.mark.parametrize(
    ("given", "begins", "continues", "adds"),
    [
        ({}, True, False, False),
        ({"add_generation_prompt": False}, False, False, False),
        ({"continue_final_message": True}, False, True, False),
        ({"continue_final_message": True, "add_generation_prompt": False}, False, True, True),
    ],
)
def test_options_of_a_chat(
    given: dict[str, bool], begins: bool, continues: bool, adds: bool
) -> None:
    """sglang#3417, tinker-feedback#125."""

    message = pb.ChatMessage(role="assistant", content="hi")
    chat = pb.ChatMessages(messages=[message], **given)
    request = pb.GenerateRequest(chat=chat, add_special_tokens=True if adds else None)
    expected = Chat((ChatMessage("assistant", "hi"),), begins, continues, adds)
    assert convert.from_generate_request(request, VOCAB).prompts == (expected,)


@pytest.mark.parametrize(("given", "adds"), [(None, True), (True, True), (False, False)])
def test_special_tokens_of_a_text(given: bool | None, adds: bool) -> None:
    request = pb.GenerateRequest(text="a", add_special_tokens=given)
    assert convert.from_generate_request(request, VOCAB).prompts == (Text("a", adds),)


def chat_request(*messages: pb.ChatMessage) -> pb.GenerateRequest:
    return pb.GenerateRequest(chat=pb.ChatMessages(messages=messages))


def test_fields_of_messages() -> None:
    call = pb.ToolCall(name="weather", arguments="{}", id="c1")
    request = chat_request(
        pb.ChatMessage(role="user", content="hi", name="ada", reasoning="hm"),
        pb.ChatMessage(role="assistant", reasoning="hm", tool_calls=[call]),
        pb.ChatMessage(role="tool", content="12", tool_call_id="c1", name="weather"),
    )
    assert convert.from_generate_request(request, VOCAB).prompts == (
        Chat(
            (
                ChatMessage("user", "hi"),
                ChatMessage("assistant", "", "hm", (ToolCall("weather", "{}", "c1"),)),
                ChatMessage("tool", "12", tool_call_id="c1", name="weather"),
            )
        ),
    )


def tool(**fields: Any) -> pb.Tool:
    return pb.Tool(**{"name": "f", **fields})


def test_tools() -> None:
    schema = '{"type": "object"}'
    chat = pb.ChatMessages(
        messages=[pb.ChatMessage(role="user", content="hi")],
        tools=[tool(name="a", description="b", parameters=schema), tool(name="c")],
        single_tool_call=True,
        separate_reasoning=True,
    )
    found = convert.from_generate_request(pb.GenerateRequest(chat=chat), VOCAB)
    tools = (Tool("a", "b", schema), Tool("c"))
    values = {
        "a": Value(bool_value=True),
        "b": Value(number_value=3),
        "c": Value(number_value=0.5),
        "d": Value(string_value="x"),
        "e": Value(null_value=0),
    }
    given = pb.ChatMessages(
        messages=chat.messages, chat_template_kwargs=values, reasoning_effort="low"
    )
    [prompt] = convert.from_generate_request(pb.GenerateRequest(chat=given), VOCAB).prompts
    assert isinstance(prompt, Chat)
    assert prompt.variables == {"a": True, "b": 3, "c": 0.5, "d": "x", "e": None}
    assert prompt.reasoning_effort == "low"
    wanted = ReadingOptions(tools, 1, (), has_thoughts=True, path="chat.", listed=tools)
    assert found.reading == wanted
    [prompt] = found.prompts
    assert isinstance(prompt, Chat)
    assert prompt.tools == tools
    chat.tool_choice = pb.TOOL_CHOICE_NONE
    found = convert.from_generate_request(pb.GenerateRequest(chat=chat), VOCAB)
    assert isinstance(found.prompts[0], Chat)
    assert found.reading is not None
    assert found.prompts[0].tools == found.reading.tools == ()
    chat.required_tool = "c"
    found = convert.from_generate_request(pb.GenerateRequest(chat=chat), VOCAB)
    assert found.reading is not None
    assert found.reading.forced == (Tool("c"),)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [tool(name="a b")]}, "tools[0]"),
        ({"tools": [tool(), tool()]}, "tools[1]"),
        ({"tools": [tool(parameters="[]")]}, "tools[0].parameters"),
        ({"tools": [tool(parameters="{")]}, "tools[0].parameters"),
        ({"tools": [tool(parameters='{"a":"\\ud800"}')]}, "tools[0].parameters"),
        ({"tools": [tool(parameters='{"a":NaN}')]}, "tools[0].parameters"),
        ({"tools": [tool(parameters='{"a":' * 50 + "1" + "}" * 50)]}, "tools[0].parameters"),
        ({"tools": [tool(parameters="[" * 100_000)]}, "tools[0].parameters"),
        ({"tools": [tool(description="x" * (1 << 18))]}, "tools"),
        ({"tools": [tool()], "required_tool": "x"}, "tool_choice"),
        ({"tool_choice": pb.TOOL_CHOICE_REQUIRED}, "tool_choice"),
        ({"tool_choice": 9}, "tool_choice"),
        ({"reasoning_effort": "most"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"a": Value(string_value="x" * 513)}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": Value(list_value={})}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": Value(number_value=math.inf)}}, "chat_template_kwargs"),
    ],
)
def test_tools_out_of_range_name_the_field(fields: dict[str, Any], field: str) -> None:
    user = pb.ChatMessage(role="user", content="a")
    chat = pb.ChatMessages(messages=[user], **fields)
    with pytest.raises(InvalidArgument) as caught:
        convert.from_generate_request(pb.GenerateRequest(chat=chat), VOCAB)
    assert caught.value.subject == f"chat.{field}"


LONG = "x" * 600
CALL = pb.ToolCall(name="a")


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (pb.ChatMessage(role="tool", name=LONG), "name"),
        (pb.ChatMessage(role="tool", tool_call_id=LONG), "tool_call_id"),
        (pb.ChatMessage(role="user", tool_call_id="a"), "tool_call_id"),
        (pb.ChatMessage(role="user", tool_calls=[CALL]), "tool_calls"),
        (pb.ChatMessage(role="assistant", tool_calls=[CALL] * 129), "tool_calls"),
        (
            pb.ChatMessage(role="assistant", tool_calls=[CALL, pb.ToolCall()]),
            "tool_calls[1].name",
        ),
        (
            pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(name="a", id=LONG)]),
            "tool_calls[0].id",
        ),
    ],
)
def test_messages_out_of_range_name_the_field(message: pb.ChatMessage, field: str) -> None:
    user = pb.ChatMessage(role="user", content="a")
    with pytest.raises(InvalidArgument) as caught:
        convert.from_generate_request(chat_request(user, message), VOCAB)
    assert caught.value.subject == f"chat.messages[1].{field}"


USER = pb.ChatMessage(role="user", content="a")
BOTH = pb.ChatMessages(messages=[USER], continue_final_message=True, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("request_", "subject"),
    [
        (pb.GenerateRequest(chat=BOTH), "chat.continue_final_message"),
        (
            pb.GenerateRequest(
                chat=pb.ChatMessages(messages=[USER, USER], continue_final_message=True)
            ),
            "chat.messages[1].role",
        ),
        (
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), add_special_tokens=True),
            "add_special_tokens",
        ),
        (pb.GenerateRequest(), "prompt"),
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
        parts=[TokenLogprobs.of(4, -0.5, (4, 9), (-0.5, -2.0)), TokenLogprobs(5, -1.0)],
        finish_reason=FinishReason.LENGTH,
        usage=Usage(3, 2, 1),
        timings=Timings(0.5, 0.25, 1.5),
    )
    request = Request("r", (1,), SamplingParams(), key="sha256:f", names=("default/upper@2",))
    binding = Binding("default/upper@2", "default", "sha256:f", 8)
    identity = convert.to_identity(binding, request)
    assert convert.to_identity(None, request) is None
    assert convert.to_identity(binding, replace(request, key="")).is_inactive
    [response] = convert.Answer("r", identity).responses(delta)
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
    [response] = convert.Answer("r").responses(Delta(token_ids=[4]))
    assert response.finish_reason == pb.FINISH_REASON_UNSPECIFIED
    for field in ("usage", "timings", "adapter"):
        assert not response.HasField(field)


def test_experts_of_many_tokens_come_in_several_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "MAX_ARRAY_BYTES", 13)
    pieces = [RoutedExperts(0, 3, 2, 1, bytes(range(24))), RoutedExperts(4, 3, 2, 1, bytes(6))]
    delta = Delta([7], "a", finish_reason=FinishReason.LENGTH, parts=[*pieces])
    responses = list(convert.Answer("r").responses(delta))
    parts = [each.routed_experts for each in responses]
    assert [(part.first_position, part.num_tokens) for part in parts] == [(0, 2), (2, 2), (4, 1)]
    assert b"".join(part.experts for part in parts) == bytes(range(24)) + bytes(6)
    assert {(part.num_layers, part.num_chosen, part.bytes_per_id) for part in parts} == {(3, 2, 1)}
    assert [list(each.token_ids) for each in responses] == [[], [], [7]]
    assert [bool(each.finish_reason) for each in responses] == [False, False, True]


def test_packed_logprobs_become_arrays_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all that a slow reader has not read at once: that would block the event loop."""
    top_k, num_converted = 100, 0
    monkeypatch.setattr(results, "MAX_ARRAY_BYTES", 2 * (12 + 8 * top_k))
    whole = results.packed_logprobs

    def packed(tokens: Sequence[TokenLogprobs], first_position: int) -> PackedLogprobs:
        nonlocal num_converted
        num_converted += len(tokens)
        return whole(tokens, first_position)

    monkeypatch.setattr(results, "packed_logprobs", packed)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCAB, (5, top_k), np.int32)
    values = rng.normal(size=(5, top_k)).astype(np.float32)
    tokens = [TokenLogprobs.of(t, -t / 2, ids[t], values[t], t + 1) for t in range(5)]
    wanted = Wanted((LogprobsOption(top_k, is_packed=True),))
    answer = convert.Answer("r", wanted=wanted)
    [_] = answer.responses(Delta([7]))
    responses = []
    for response in answer.responses(Delta(list(range(5)), "a", parts=[*tokens])):
        responses.append(response)
        assert num_converted <= 2 * len(responses) + 2  # one part ahead: the last has all else
    parts = [each.packed_logprobs for each in responses]
    assert [(part.first_position, part.num_tokens) for part in parts] == [(1, 2), (3, 2), (5, 1)]
    assert {part.top_k for part in parts} == {top_k}
    assert b"".join(part.top_token_ids for part in parts) == ids.tobytes()
    assert b"".join(part.top_logprobs for part in parts) == values.tobytes()
    assert b"".join(part.ranks for part in parts) == np.arange(1, 6, dtype=np.int32).tobytes()
    assert [list(each.token_ids) for each in responses] == [[], [], list(range(5))]


def test_every_finish_reason_is_converted() -> None:
    for reason in FinishReason:
        [response] = convert.Answer("r").responses(Delta(finish_reason=reason))
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


ADAPTER = ResidentAdapter("sha256:" + "f" * 64, "device", 2048, 8, True, 2, 1000.5, 0.25)
GRPC_BYTES = 4 << 20
"""What gRPC takes of a message unless it is told otherwise."""


def details(
    segments: list[tuple[int, SegmentKind, int, int, int]], launches: dict[str, int]
) -> AdapterDetails:
    """`segments`: target, kind, rank, offset, bytes."""
    targets, kinds, *numbers = zip(*segments, strict=True) if segments else [()] * 5
    columns = [np.array(each, dtype=np.int64) for each in (targets, *numbers)]
    extents = ((1 << 35, 1 << 30),)
    return AdapterDetails(
        *(ADAPTER, 3, extents, columns[0], tuple(kinds), *columns[1:], launches, "triton")
    )


def test_parts_of_an_adapter() -> None:
    names = ["model.embed_tokens", *(f"model.layers.0.self_attn.{n}_proj" for n in "qkv")]
    layout = ModelLayout(
        *("base", "0" * 64, torch.bfloat16, (1, 2)),
        tuple(
            Target(name, layer, group, kind, 8, 4)
            for name, layer, group, kind in zip(
                *(names, [None, 0, 0, 0], ["embed", *["layers.0.qkv"] * 3]),
                [TargetKind.EMBEDDING, *[TargetKind.LINEAR] * 3],
                strict=True,
            )
        ),
    )
    segments = [
        *((0, SegmentKind.A, 4, 0, 64), (0, SegmentKind.B, 4, 256, 32)),
        *((1, SegmentKind.A, 8, 512, 128), (1, SegmentKind.B, 8, 768, 64)),
        *(
            (3, SegmentKind.A, 2, 512, 128),
            (3, SegmentKind.B, 2, 1024, 64),
            (3, SegmentKind.BIAS, 2, 1280, 16),
        ),
        (3, SegmentKind.UNKNOWN, 2, 1536, 16),
    ]
    inspected = details(segments, {"embed": 1, "layers.0.qkv": 2, "layers.0.o": 2})
    got = convert.to_inspected(inspected, layout, pb.ResidentAdapter(rank=8))
    assert (got.adapter.rank, got.slot, got.launches, got.kernels) == (8, 3, 5, "triton")
    assert [(each.offset, each.bytes) for each in got.extents] == [(1 << 35, 1 << 30)]
    assert [each.name for each in got.targets] == [names[0], names[1], names[3]]
    assert [each.layer if each.HasField("layer") else None for each in got.targets] == [None, 0, 0]
    embedding, linear = store_pb.TARGET_KIND_EMBEDDING, store_pb.TARGET_KIND_LINEAR
    assert [each.kind for each in got.targets] == [embedding, linear, linear]
    assert [each.rank for each in got.targets] == [4, 8, 2]
    found = [(part.kind, part.offset, part.bytes) for part in got.targets[2].segments]
    assert found == [
        *((store_pb.SEGMENT_KIND_A, 512, 128), (store_pb.SEGMENT_KIND_B, 1024, 64)),
        *((store_pb.SEGMENT_KIND_BIAS, 1280, 16), (store_pb.SEGMENT_KIND_UNSPECIFIED, 1536, 16)),
    ]
    groups = [(each.name, list(each.targets), each.launches) for each in got.groups]
    assert groups == [("embed", [0], 1), ("layers.0.qkv", [1, 2], 2), ("layers.0.o", [], 2)]


def test_an_empty_adapter_has_no_parts() -> None:
    layout = ModelLayout("base", "0" * 64, torch.bfloat16, (2,), ())
    got = convert.to_inspected(details([], {}), layout, pb.ResidentAdapter())
    assert (len(got.targets), len(got.groups), got.launches) == (0, 0, 0)


def test_the_largest_adapter_is_below_grpcs_limit() -> None:
    """Every expert of a mixture by itself, behind 32 GiB of others."""
    num_experts, size = 6_000, 1 << 20
    groups = {"gate_proj": "gate_up", "up_proj": "gate_up", "down_proj": "down"}
    targets = []
    for number in range(num_experts):
        layer, expert = divmod(number, 128)
        for module, group in groups.items():
            name = f"model.layers.{layer}.mlp.experts.{expert}.{module}"
            group_name = f"layers.{layer}.experts.{expert}.{group}"
            targets.append(Target(name, layer, group_name, TargetKind.LINEAR, 2048, 768))
    layout = ModelLayout("base", "0" * 64, torch.bfloat16, (1, 2), tuple(targets))
    segments = [
        (index, kind, 64, (1 << 35) + (2 * index + place) * size, size)
        for index in range(len(targets))
        for place, kind in enumerate("ab")
    ]
    launches = {target.group: 2 for target in targets}
    names = [f"tenant/name-{number}@1" for number in range(5)]
    adapter = convert.to_resident_adapter(ADAPTER, names, False)
    got = convert.to_inspected(details(segments, launches), layout, adapter)
    assert (len(got.targets), len(got.groups)) == (18_000, 12_000)
    assert 2 * got.ByteSize() <= ADAPTER_BYTES
    assert got.ByteSize() < GRPC_BYTES
