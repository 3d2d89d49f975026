"""What a message may hold is checked before it is parsed, and every RPC of ours has bounds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.internal.encoder import _VarintBytes  # type: ignore[attr-defined]
from hypothesis import given
from hypothesis import strategies as st

from adapter_store.api.bounds import MAX_LAYOUT_BYTES
from adapter_store.api.bounds import REQUESTS as STORE
from inference_svc.api.grpc.bounds import request_bounds
from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from loadout.inference.v1 import inference_pb2
from servicekit.errors import InvalidArgument, ResourceExhausted, ServiceError
from servicekit.rpc import requests
from servicekit.rpc.places import CALLER, CallPlaces
from servicekit.rpc.requests import RequestBounds, RequestReader, largest_request
from servicekit.work_budget import WorkBudget
from tests.servicekit.rpc.served import call_places

INFERENCE = request_bounds(max_model_len=1024)
SERVICES = {
    "store": (STORE, store_pb.DESCRIPTOR.services_by_name["AdapterStoreService"]),
    "inference": (INFERENCE, inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]),
}
LAYOUT = STORE["RegisterLayout"]
METHODS = [(service, name) for service, (table, _) in SERVICES.items() for name in table]


def delimited(tag: int, body: bytes) -> bytes:
    return bytes([tag << 3 | 2]) + bytes(_VarintBytes(len(body))) + body


def layout_of(num_targets: int) -> bytes:
    return delimited(1, b"\x2a\x00" * num_targets)


def repeated_fields(message: Descriptor, path: str = "") -> Iterator[str]:
    """Yields the paths of a message's repeated fields and maps, and of what repeats within them."""
    for field in message.fields:
        if field.is_repeated:
            yield path + field.name
            entry = field.message_type
            if entry is not None and not entry.GetOptions().map_entry:
                yield from repeated_fields(entry, f"{path}{field.name}.")
        elif field.message_type is not None:
            yield from repeated_fields(field.message_type, f"{path}{field.name}.")


@pytest.mark.parametrize("service", SERVICES)
def test_every_rpc_has_bounds_of_all_that_repeats(service: str) -> None:
    table, descriptor = SERVICES[service]
    assert table.keys() == set(descriptor.methods_by_name)
    for name, bounds in table.items():
        expected = descriptor.methods_by_name[name].input_type
        assert bounds.message.DESCRIPTOR is expected
        assert bounds.max_items.keys() == set(repeated_fields(expected)), name


@pytest.mark.slow
def test_what_repeats_within_what_repeats_is_counted_of_all_together() -> None:
    """Two bytes each, in one target or in many."""
    most = LAYOUT.max_items["layout.targets.other_names"]
    for num_targets in (1, 1000):
        share = b"\x52\x00" * (most // num_targets + 1)
        raw = delimited(1, delimited(5, share) * num_targets)
        with pytest.raises(InvalidArgument, match="more than") as caught:
            LAYOUT.parse(raw)
        assert caught.value.subject == "layout.targets.other_names"
    raw = delimited(1, delimited(5, delimited(10, delimited(3, b"\x01" * (most * 10 + 1)))))
    with pytest.raises(InvalidArgument) as caught:
        LAYOUT.parse(raw)
    assert caught.value.subject == "layout.targets.other_names.block_sizes"


@pytest.mark.slow
def test_the_other_fields_of_what_repeats_are_bounded() -> None:
    """A layer each, again and again."""
    raw = delimited(1, delimited(5, b"\x10\x01" * (3 << 20)))
    with pytest.raises(InvalidArgument, match=r"layout\.targets\.\*: more than"):
        LAYOUT.parse(raw)


def test_only_layouts_may_be_large() -> None:
    sizes = {name: bounds.max_bytes for name, bounds in STORE.items()}
    assert sizes.pop("RegisterLayout") == MAX_LAYOUT_BYTES == largest_request(STORE)
    assert sizes.pop("UploadAdapter") == 4 << 20
    assert set(sizes.values()) == {64 << 10}


def test_only_prompts_may_be_large() -> None:
    sizes = {name: bounds.max_bytes for name, bounds in INFERENCE.items()}
    assert sizes.pop("Generate") == 4 << 20 == largest_request(INFERENCE)
    assert sizes.pop("UploadImage") == (1 << 20) + (64 << 10)  # a piece of a file
    for name in ("Tokenize", "Detokenize", "Embed", "Score", "Classify"):
        assert sizes.pop(name) == 4 << 20
    assert set(sizes.values()) == {64 << 10}


@pytest.mark.slow
def test_the_largest_layout_that_we_know_of_fits() -> None:
    """Kimi K2, with one target for each expert's matrix."""
    targets = [
        store_pb.Target(
            name=f"model.layers.{layer}.mlp.experts.{expert}.{name}",
            layer=layer,
            group=f"layers.{layer}.experts.{expert}.{name}",
            kind=store_pb.TARGET_KIND_LINEAR,
            in_features=7168,
            out_features=2048,
        )
        for layer in range(61)
        for expert in range(384)
        for name in ("gate_proj", "up_proj", "down_proj")
    ]
    layout = store_pb.ModelLayout(base_model="kimi", config_sha256="a" * 64, targets=targets)
    raw = store_pb.RegisterLayoutRequest(layout=layout).SerializeToString()
    assert len(raw) < 0.8 * MAX_LAYOUT_BYTES
    assert LAYOUT.parse(raw).layout == layout


TOO_MANY = {
    "targets": (LAYOUT, layout_of((1 << 17) + 1), "layout.targets"),
    "labels": (STORE["RegisterAdapter"], b"\x3a\x00" * 65, "labels"),
    "labels of an upload": (STORE["UploadAdapter"], delimited(1, b"\x32\x00" * 65), "meta.labels"),
    "tenants": (STORE["GetAdapter"], b"\x12\x00" * 1025, "tenants"),
    "ids, packed": (
        INFERENCE["Generate"],
        delimited(5, delimited(1, b"\x01" * 30_000)),
        "token_ids.ids",
    ),
    "ids, each of its own": (
        INFERENCE["Generate"],
        delimited(5, b"\x08\x01" * 2049),
        "token_ids.ids",
    ),
    "ids that fit, but are not packed": (
        request_bounds(max_model_len=1 << 17)["Generate"],
        delimited(5, b"\x08\x01" * 4097),
        "token_ids.ids",
    ),
    "ids, packed, a few too many": (
        INFERENCE["Generate"],
        delimited(5, delimited(1, b"\x01" * 2049)),
        "token_ids.ids",
    ),
    "chat": (INFERENCE["Generate"], delimited(6, b"\x0a\x00" * 16_385), "chat.messages"),
    "in two pieces": (LAYOUT, layout_of(70_000) * 2, "layout.targets"),
    "unknown fields": (LAYOUT, b"\xf8\x07\x01" * 1025, "request"),
    "unknown fields of a chunk": (
        STORE["UploadAdapter"],
        delimited(2, b"\xf8\x07\x01" * 1025),
        "request",
    ),
    "a layout many times": (LAYOUT, layout_of(0) * 1025, "request"),
}


@pytest.mark.parametrize("case", TOO_MANY)
def test_too_many_entries_are_refused(case: str) -> None:
    bounds, raw, path = TOO_MANY[case]
    assert len(raw) <= bounds.max_bytes
    bounds.message.FromString(raw)  # it is a message
    with pytest.raises(InvalidArgument) as raised:
        bounds.parse(raw)
    assert raised.value.subject == path


def test_a_large_message_is_refused() -> None:
    with pytest.raises(ResourceExhausted) as raised:
        STORE["PinAdapter"].parse(bytes(65_537))
    assert raised.value.reason == "REQUEST_TOO_LARGE"


def test_a_long_text_is_refused() -> None:
    request = store_pb.ListAdaptersRequest(filter="x" * 4097)
    with pytest.raises(InvalidArgument) as raised:
        STORE["ListAdapters"].parse(request.SerializeToString())
    assert raised.value.subject == "filter"


def test_unknown_fields_are_discarded() -> None:
    request = STORE["GetAdapter"].parse(b"\x0a\x01a\xfa\x07\x04abcd")
    assert request.SerializeToString() == b"\x0a\x01a"


@pytest.mark.parametrize("raw", [b"\x0a", b"\x0a\x05ab", b"\x0b", b"\xff" * 20, b"\x09abc"])
def test_bytes_that_are_no_message_are_the_callers_fault(raw: bytes) -> None:
    for bounds in (LAYOUT, STORE["PinAdapter"]):
        with pytest.raises(InvalidArgument) as raised:
            bounds.parse(raw)
        assert raised.value.reason == "MALFORMED_REQUEST"


@given(st.sampled_from(METHODS), st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(method: tuple[str, str], raw: bytes) -> None:
    service, name = method
    bounds = SERVICES[service][0][name]
    try:
        found = bounds.parse(raw)
    except InvalidArgument:
        return
    assert len(found.SerializeToString()) <= 2 * len(raw)


class Arriving:
    """Requests of one call each, which arrive when they are released. `asked` counts those whose
    message is being read."""

    def __init__(self, raw: bytes = b"") -> None:
        self.asked = 0
        self.release = asyncio.Event()
        self._raw = raw

    async def read(self) -> bytes:
        self.asked += 1
        await self.release.wait()
        return self._raw


async def read(reader: RequestReader, requests: Any, bounds: RequestBounds) -> Any:
    with await reader.place() as place:
        return await reader.read(requests, bounds, place)


def reader_of(places: CallPlaces) -> RequestReader:
    return RequestReader(places, MAX_LAYOUT_BYTES)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_caller_that_sends_slowly_waits_for_itself_alone() -> None:
    """Each message takes as much as gRPC may receive, until it is here."""

    async def main() -> None:
        places = call_places(request_bytes=8 * MAX_LAYOUT_BYTES)
        reader, slow, quick = reader_of(places), Arriving(), Arriving()
        bounds = STORE["GetAdapter"]
        CALLER.set("slow")
        calls = [asyncio.create_task(read(reader, slow, bounds)) for _ in range(50)]
        await settle()
        assert slow.asked == 4
        assert places.request_bytes.used_by("slow") == 4 * MAX_LAYOUT_BYTES
        CALLER.set("quick")
        quick.release.set()
        assert await read(reader, quick, bounds) == store_pb.GetAdapterRequest()
        slow.release.set()
        await asyncio.gather(*calls)
        assert places.request_bytes.used == 0

    asyncio.run(main())


def test_a_message_keeps_its_size_until_its_handler_lets_go() -> None:
    async def main() -> None:
        places = call_places()
        reader, arriving = reader_of(places), Arriving(layout_of(15_000))
        arriving.release.set()
        with await reader.place() as place:
            await reader.read(arriving, LAYOUT, place)
            assert places.request_bytes.used == len(layout_of(15_000))
            place.shrink(0)
            await reader.read(arriving, LAYOUT, place)
        assert places.request_bytes.used == 0

    asyncio.run(main())


def places_that_never_forgive() -> CallPlaces:
    """Debts decay by the clock, on a busy machine faster than a message adds to them: here not."""
    places = call_places()
    places.request_work = WorkBudget("request_work", share=0.5, processors=1e-9)
    return places


@pytest.mark.slow
def test_what_large_messages_take_is_a_debt() -> None:
    """Whether they are refused or not, for reading them and for parsing them."""

    async def main() -> None:
        CALLER.set("a")
        for bounds, raw in (
            (STORE["GetAdapter"], b"\xf8\x07\x01" * (1 << 20)),
            (LAYOUT, layout_of(131_072)),
            (LAYOUT, layout_of(131_073)),
        ):
            # On a busy machine one alone is more than a burst, and the next would have to wait.
            places = places_that_never_forgive()
            arriving = Arriving(raw)
            arriving.release.set()
            with suppress(ServiceError):
                await read(reader_of(places), arriving, bounds)
            assert places.request_work.debt_s("a") > 0.005
            places.close()
        places = places_that_never_forgive()
        places.request_work.charge("a", 100.0)
        waiting = asyncio.create_task(reader_of(places).place())
        await settle()
        assert not waiting.done()
        waiting.cancel()
        CALLER.set("b")
        (await reader_of(places).place()).release()
        places.close()

    asyncio.run(main())


def test_of_a_stream_the_message_that_was_refused_is_a_debt() -> None:
    chunk = store_pb.FileChunk(file_name="a", data=bytes(2 << 20))
    raw = store_pb.UploadAdapterRequest(chunk=chunk).SerializeToString()

    class Stream:
        def __init__(self, *messages: Any) -> None:
            self._messages = [*messages, grpc.aio.EOF]

        async def read(self) -> Any:
            return self._messages.pop(0)

    async def main() -> None:
        places = places_that_never_forgive()
        reader, bounds = reader_of(places), STORE["UploadAdapter"]
        async for _ in reader.read_stream(Stream(raw, raw), bounds):
            pass
        assert places.request_work.debt_s("") == 0
        taken = reader.read_stream(Stream(raw, raw), bounds)
        await anext(taken)
        await taken.aclose()
        taken_s = places.request_work.debt_s("")
        assert taken_s > 0.005
        unknown = delimited(2, b"\xf8\x07\x01" * (1 << 20))
        with pytest.raises(InvalidArgument):
            await anext(reader.read_stream(Stream(unknown), bounds))
        assert places.request_work.debt_s("") > taken_s + 0.005
        places.close()

    asyncio.run(main())


@pytest.mark.slow
def test_callers_take_turns_with_the_parser() -> None:
    """One has a hundred large messages in the queue; another's is next."""

    async def main() -> list[str]:
        places, order = call_places(request_bytes=1 << 30), []
        reader = reader_of(places)

        async def parse(account: str) -> None:
            CALLER.set(account)
            arriving = Arriving(layout_of(10_000))
            arriving.release.set()
            await read(reader, arriving, LAYOUT)
            order.append(account)

        busy = [asyncio.create_task(parse("busy")) for _ in range(10)]
        await settle()
        await asyncio.create_task(parse("other"))
        await asyncio.gather(*busy)
        places.close()
        return order

    assert asyncio.run(main()).index("other") <= 3


def test_a_message_that_does_not_arrive_ends_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "ARRIVAL_SECONDS", 0.01)

    async def main() -> Any:
        return await read(reader_of(call_places()), Arriving(), STORE["GetAdapter"])

    with pytest.raises(Exception, match="not arrived") as raised:
        asyncio.run(main())
    assert raised.value.reason == "REQUEST_TOO_SLOW"  # type: ignore[attr-defined]


def test_a_call_without_a_message_is_refused() -> None:
    class Ended:
        async def read(self) -> Any:
            return grpc.aio.EOF

    with pytest.raises(InvalidArgument, match="no request"):
        asyncio.run(read(reader_of(call_places()), Ended(), STORE["GetAdapter"]))


def test_what_may_be_much_is_parsed_off_the_event_loop() -> None:
    threads: list[str] = []

    class Watched(RequestBounds):
        __slots__ = ()

        def parse(self, raw: bytes) -> Any:
            threads.append(threading.current_thread().name)
            return super().parse(raw)

    async def main() -> None:
        reader = reader_of(call_places())
        bounds = Watched(LAYOUT.message, LAYOUT.max_bytes, LAYOUT.max_items)
        for num_targets in (1, 1000, 2000, 40_000):
            arriving = Arriving(layout_of(num_targets))
            arriving.release.set()
            await read(reader, arriving, bounds)

    asyncio.run(main())
    main_thread = threading.main_thread().name
    assert [name == main_thread for name in threads] == [True, True, False, False]
    assert threads[-1].startswith("parse")
