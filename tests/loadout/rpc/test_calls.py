"""Requests as the contract wants them, and bad arguments refused before anything is sent."""

from __future__ import annotations

import re
import typing
from typing import Any

import pytest

from loadout import types
from loadout._rpc import calls
from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from loadout.errors import InvalidArgument
from loadout.inference.v1 import inference_pb2 as inference_pb


def generate(prompt, **sampling):
    return calls.generate(prompt, "fr", 7, "id", 2, "salt", sampling).request


def test_text_prompt_and_routing_fields():
    request = generate("hello")
    assert request.WhichOneof("prompt") == "text"
    assert request == inference_pb.GenerateRequest(
        text="hello",
        adapter="fr",
        min_revision=7,
        request_id="id",
        priority=2,
        cache_salt="salt",
        sampling=inference_pb.SamplingParams(),
    )


def test_no_adapter_is_the_base_model():
    call = calls.generate("hello", None, 0, "", 0, "", {})
    assert (call.request.adapter, call.adapter) == ("", "")


def test_content_in_parts_is_refused_without_quoting_it():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(InvalidArgument, match="parts of image_url, text: give the text") as e:
        generate([{"role": "user", "content": [{"type": "text", "text": "what?"}, image]}])
    assert e.value.subject == "chat.messages[0].content"
    assert "AAAA" not in str(e.value)


@pytest.mark.parametrize(
    "ids", [[1, 2, 3], (1, 2, 3), range(1, 4)], ids=lambda ids: type(ids).__name__
)
def test_token_prompt(ids):
    assert list(generate(ids).token_ids.ids) == [1, 2, 3]


def test_chat_prompt():
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "hi"}]
    chat = generate(messages).chat.messages
    assert [(each.role, each.content) for each in chat] == [("system", "short"), ("user", "hi")]


def test_options_of_a_chat_are_sent_and_need_a_chat() -> None:
    """sglang#3417, tinker-feedback#125."""
    options = {"continue_final_message": True, "add_generation_prompt": False}
    messages = [{"role": "assistant", "content": "hi"}]

    def request(prompt: Any, **options: Any) -> Any:
        return calls.generate(prompt, "", 0, "", 0, "", {}, **options).request

    chat = request(messages, **options).chat
    assert chat.continue_final_message
    assert chat.HasField("add_generation_prompt")
    assert not chat.add_generation_prompt
    assert not request(messages).chat.HasField("add_generation_prompt")
    assert not request("x").HasField("add_special_tokens")
    assert request("x", add_special_tokens=False).HasField("add_special_tokens")
    for name, value in options.items():
        for prompt in ("x", [1, 2], []):
            with pytest.raises(InvalidArgument, match="only with chat messages") as caught:
                request(prompt, **{name: value})
            assert caught.value.subject == name


def test_empty_token_prompt_is_left_for_the_server_to_refuse():
    assert generate([]).WhichOneof("prompt") == "token_ids"


@pytest.mark.parametrize(
    ("prompt", "subject"),
    [
        ([1, "two"], "token_ids.ids"),
        ([-1], "token_ids.ids"),
        ([1 << 32], "token_ids.ids"),
        ([{"role": "user", "content": 5}], "chat.messages[0].content"),
        ([{"role": "user", "content": None}], "chat.messages[0].content"),
        ([{"role": "assistant", "content": None}, {"role": "tool"}], "chat.messages[1].content"),
        ([{"role": "user", "content": "a", "text": "hi"}], "chat.messages[0].text"),
    ],
    ids=str,
)
def test_bad_prompt_names_the_field(prompt, subject):
    with pytest.raises(InvalidArgument, match=r"must be|is not a known field") as caught:
        generate(prompt)
    assert caught.value.subject == subject


@pytest.mark.parametrize(
    ("images", "subject"),
    [
        ([b"AAAA"], "chat.messages[0].images[0]"),
        ([{"data": b"a"}, "AAAA"], "chat.messages[0].images[1]"),
        (b"AAAA", "chat.messages[0].images"),
        (5, "chat.messages[0].images"),
        ([{"data": "AAAA"}], "chat.messages[0].images[0].data"),
        ([{"data": bytearray(b"AAAA"), "sha256": b"x" * 32}], "chat.messages[0].images[0].data"),
        ([{"sha256": "AAAA"}], "chat.messages[0].images[0].sha256"),
    ],
    ids=str,
)
def test_images_of_another_type_are_refused_by_name(images, subject):
    with pytest.raises(InvalidArgument, match="must be") as caught:
        generate([{"role": "user", "content": "a", "images": images}])
    assert caught.value.subject == subject


class Ids(list[int]):
    """Token ids that count how many were looked at."""

    num_seen = 0

    def __iter__(self):
        for each in super().__iter__():
            self.num_seen += 1
            yield each


def test_token_ids_are_not_searched_for_images():
    ids = Ids(range(1000))
    assert calls.generate(ids, "", 0, "", 0, "", {}).images is None
    assert ids.num_seen <= len(ids) + 1


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"contents": "a"}, "chat.messages[0].contents is not a known field; did you mean content"),
        ({"text": "a"}, "the fields are role, content, reasoning"),
        ({"name": 5}, "chat.messages[0].name must be a str, not 5"),
        ({"tool_calls": [{"name": "f", "args": ""}]}, "chat.messages[0].tool_calls[0].args is not"),
    ],
    ids=str,
)
def test_wrong_fields_are_refused_in_our_words(message, text):
    with pytest.raises(InvalidArgument, match=re.escape(text)):
        generate([{"role": "user", "content": "a", **message}])
    with pytest.raises(
        InvalidArgument, match=r"chat\.tools\[0\]\.parameters must be a JSON schema"
    ):
        generate([{"role": "user", "content": "a"}], tools=[{"name": "f", "parameters": {1}}])
    with pytest.raises(InvalidArgument, match="integer from 0 to 2\\*\\*32 - 1, not -1"):
        generate("x", max_tokens=-1)


def test_unset_sampling_stays_unset():
    sampling = generate("x", temperature=0, seed=None).sampling
    assert sampling.HasField("temperature")
    assert sampling.temperature == 0
    assert not sampling.HasField("seed")
    assert not sampling.HasField("max_tokens")


def test_stop_takes_one_string_or_many():
    assert list(generate("x", stop="\n\n").sampling.stop) == ["\n\n"]
    assert list(generate("x", stop=["a", "b"]).sampling.stop) == ["a", "b"]


def test_sampling_words_are_the_contracts():
    fields = inference_pb.SamplingParams.DESCRIPTOR.fields_by_name
    assert set(typing.get_type_hints(types.SamplingParams)) == set(fields)


def test_unknown_sampling_argument():
    with pytest.raises(
        TypeError, match="unknown argument 'max_new_tokens'; sampling has max_tokens"
    ):
        generate("x", max_new_tokens=5)


@pytest.mark.parametrize(
    "sampling",
    [{"max_tokens": -1}, {"max_tokens": "five"}, {"seed": 1 << 64}, {"top_p": "x"}],
    ids=str,
)
def test_bad_sampling_names_the_field(sampling):
    with pytest.raises(InvalidArgument) as caught:
        generate("x", **sampling)
    assert caught.value.subject == f"sampling.{next(iter(sampling))}"
    assert caught.value.code == "INVALID_ARGUMENT"


def test_generate_goes_again_only_unanswered():
    call = calls.generate("x", "", 0, "", 0, "", {})
    chunk = object()
    assert call.resume(None) is call.request
    assert call.resume(chunk) is None


def test_watch_resumes_after_the_last_event():
    call = calls.watch(5)
    event = types.AdapterEvent(9, types.EventKind.UPDATED, "n", 1, "d", None)
    assert call.resume(None) == store_pb.WatchAdaptersRequest(since_revision=5)
    assert call.resume(event) == store_pb.WatchAdaptersRequest(since_revision=9)


def test_what_may_be_repeated():
    new = calls.NewAdapter("n")
    assert calls.register(new, "s3://b/p").repeatable
    conditional = calls.NewAdapter("n", if_current_digest="sha256:00")
    assert not calls.register(conditional, "s3://b/p").repeatable
    assert not calls.delete("n", 0).repeatable
    assert not calls.unload("n").repeatable
    assert calls.get("n").repeatable
    assert calls.load("n", True).repeatable


def test_register_labels():
    new = calls.NewAdapter("n", "base", "e", "i", True, {"team": "x"})
    request = calls.register(new, "s3://b/p").request
    assert request == store_pb.RegisterAdapterRequest(
        name="n",
        source_uri="s3://b/p",
        base_model="base",
        expected_digest="e",
        if_current_digest="i",
        pinned=True,
        labels={"team": "x"},
    )
    with pytest.raises(InvalidArgument, match="labels"):
        calls.register(calls.NewAdapter("n", labels={"team": 1}), "s3://b/p")


FORMS: list[tuple[dict[str, Any], inference_pb.Structure]] = [
    ({"json_schema": {"type": "null"}}, inference_pb.Structure(json_schema='{"type": "null"}')),
    ({"json_schema": "{}"}, inference_pb.Structure(json_schema="{}")),
    ({"json_schema": True}, inference_pb.Structure(json_schema="true")),
    ({"json_object": True}, inference_pb.Structure(json_object=True)),
    ({"regex": "a+"}, inference_pb.Structure(regex="a+")),
    ({"choice": ("a", "b")}, inference_pb.Structure(choice={"texts": ["a", "b"]})),
    ({"grammar": 'start: "a"'}, inference_pb.Structure(grammar='start: "a"')),
]


def test_forms_of_answers() -> None:
    for form, message in FORMS:
        assert generate("hello", structure=form).sampling.structure == message
    assert {name for form, _ in FORMS for name in form} == set(calls.STRUCTURE_NAMES)
    bad_forms = (
        {},
        {"regex": "a", "json_object": True},
        {"json": {}},
        {"regex": 5},
        {"choice": "ab"},
    )
    for bad in bad_forms:
        with pytest.raises(InvalidArgument) as caught:
            generate("hello", structure=bad)
        assert caught.value.subject.startswith("sampling.structure")
