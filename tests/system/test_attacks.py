"""Nobody takes the services from others over gRPC: attacks on real processes, and their costs."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from loadout.inference.v1 import inference_pb2
from tests.support import forks
from tests.support.access.certificates import Authority
from tests.support.access.policies import token_of
from tests.support.models.zoo import Zoo
from tests.support.servers.http2 import Connection, message
from tests.support.store.client import Client
from tests.support.wait import until
from tests.system.attacked import Attacked, attacked_inference, attacked_store
from tests.system.attacks import (
    HEALTH,
    MESSAGES,
    SERVICES,
    STRANGER,
    half_handshakes,
    metadata_storm,
    paths_of,
    reset_storm,
    stray_calls,
)
from tests.system.repeat_calls import AWAITS, CANCELS

pytestmark = [pytest.mark.slow, pytest.mark.processes]

MAX_GROWTH_MIB = 50
"""What all callers without a token together may make a service hold."""
MAX_STORM_MIB = 120
"""What is held of a storm until it is noticed, on a machine that does much else: 5 to 45 where it
does not, and 250 to 1,000 without bounds."""
MAX_TENANT_MIB = 300
"""What one tenant's calls may make a service hold: its half of --request-memory (64 MiB of the
store's, 32 of the other's) with gRPC's copy and ours, and what they are parsed and converted to."""
for_seconds = pytest.mark.parametrize(
    "seconds", [1, pytest.param(10, marks=pytest.mark.long)], ids=["1 s", "10 s"]
)
NUM_PROBES = 20
MAX_VICTIM_S = 2.0
"""Far above what is measured, for machines that do much else."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    made = attacked_store(tmp_path_factory.mktemp("attacked"))
    yield made
    made.stop()


@pytest.fixture(scope="module")
def inference(
    zoos: Callable[[str], Zoo], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Attacked]:
    made = attacked_inference(tmp_path_factory.mktemp("attacked"), zoos("llama").model_dir)
    yield made
    made.stop()


@pytest.fixture
def service(request: pytest.FixtureRequest) -> Attacked:
    found: Attacked = request.getfixturevalue(request.param)
    return found


both = pytest.mark.parametrize(
    ("service", "name"), [(name, name) for name in SERVICES], indirect=["service"], ids=SERVICES
)


@for_seconds
@both
def test_strangers_hold_little(service: Attacked, name: str, seconds: int) -> None:
    """Whatever they send and keep open, whole messages or parts, in whatever order."""
    dice = random.Random(14)
    with ExitStack() as stack, service.grown_mib() as grown:
        held = [
            stack.enter_context(Connection(service.address, source=STRANGER)) for _ in range(200)
        ]
        # Each method at least once, the open ones often.
        plan = paths_of(name) + [f"{HEALTH}/Check", f"{HEALTH}/Watch"] * 5
        end_s = time.monotonic() + seconds
        for number, path in enumerate(
            itertools.chain(plan, iter(lambda: dice.choice(plan), None)), start=1
        ):
            with suppress(OSError):
                held.append(stack.enter_context(stray_calls(service.address, path, dice)))
            if time.monotonic() > end_s and number >= len(plan) and len(held) > 200:
                break
    print(f"{name}: {len(held)} connections, {grown[0]:.1f} MiB")
    assert grown[0] <= MAX_GROWTH_MIB


@both
def test_watches_of_strangers_keep_no_request(service: Attacked, name: str) -> None:
    """12 requests of 60 MiB each, of fields that nobody knows: 64 MiB each were kept."""
    body = b"\x12" + b"\x80\x80\x80\x1e" + bytes(60 << 20)
    with ExitStack() as stack, service.grown_mib() as grown:
        for _ in range(12):
            try:
                connection = Connection(service.address, source=STRANGER)
            except OSError:  # it lets its address wait
                break
            stack.enter_context(connection)
            connection.receive(0.05)
            stream = connection.call(f"{HEALTH}/Watch")
            connection.send(stream, message(body), end=True)
    print(f"{name}: {grown[0]:.1f} MiB")
    assert grown[0] <= MAX_GROWTH_MIB


@both
def test_a_stranger_does_not_keep_probes_out(service: Attacked, name: str) -> None:
    with ExitStack() as stack:
        for path in (f"{HEALTH}/Check", f"{HEALTH}/Watch") * 20:
            connection = stack.enter_context(Connection(service.address, source=STRANGER))
            connection.receive(0.05)
            for _ in range(5):
                connection.send(connection.call(path), message(bytes(999), declared=1000))
        with grpc.insecure_channel(service.address) as channel:
            answer = channel.unary_unary(f"{HEALTH}/Check")(b"", timeout=MAX_VICTIM_S)
    assert answer == b"\x08\x01"  # SERVING


STORMS = {"metadata": metadata_storm, "resets": reset_storm}


@for_seconds
@pytest.mark.parametrize("storm", STORMS)
@both
def test_a_storm_of_strangers_takes_nothing_from_others(
    service: Attacked, name: str, storm: str, seconds: int
) -> None:
    """Their calls ended CANCELLED, and a gigabyte was held."""
    path = paths_of(name)[0]
    with service.grown_mib() as grown, Probe(service.address, name) as probe:
        until(lambda: len(probe.seconds) >= NUM_PROBES)
        STORMS[storm](service.address, path, time.monotonic() + seconds)
        count = len(probe.seconds)
        until(lambda: len(probe.seconds) >= count + NUM_PROBES)
    print(f"{name}, {storm}: {max(probe.seconds):.2f} s, {grown[0]:.1f} MiB")
    assert grown[0] <= MAX_STORM_MIB


def test_handshakes_that_are_half_sent_hold_little(tmp_path: Path) -> None:
    """1,900 connections at once, of each half a hello of TLS, held 150 MiB, and left 100."""
    authority = Authority(tmp_path)
    cert, key = authority.issue("server")
    store = attacked_store(tmp_path, "--tls-cert-file", str(cert), "--tls-key-file", str(key))
    with (
        store.grown_mib() as grown,
        Probe(store.address, "store", grpc.ssl_channel_credentials(authority.pem)) as probe,
    ):
        until(lambda: len(probe.seconds) >= NUM_PROBES)
        num_opened = half_handshakes(store.address, rounds=2)
    print(f"{num_opened} handshakes, {grown[0]:.1f} MiB, {max(probe.seconds):.2f} s")
    store.stop()
    assert num_opened >= 200  # on a slow machine the first have ended when the last come
    assert grown[0] <= MAX_STORM_MIB


# --- with a token ------------------------------------------------------------------------------


class Probe:
    """Calls from another tenant while an attack runs; `seconds` has how long each took."""

    def __init__(
        self, address: str, name: str, credentials: grpc.ChannelCredentials | None = None
    ) -> None:
        self.seconds: list[float] = []
        if credentials is None:
            self._channel = grpc.insecure_channel(address)
        else:
            self._channel = grpc.secure_channel(address, credentials)
        self._codes: set[grpc.StatusCode] = set()
        method, request = VICTIMS[name]
        self._call = self._channel.unary_unary(f"/{SERVICES[name].full_name}/{method}")
        self._request = request.SerializeToString()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Probe:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self._channel.close()
        assert self._codes <= {grpc.StatusCode.OK, grpc.StatusCode.NOT_FOUND}

    def _run(self) -> None:
        metadata = (("authorization", f"Bearer {token_of('victim')}"),)
        while not self._stop.wait(0.01):
            start_s = time.monotonic()
            self._codes.add(self._call.future(self._request, metadata=metadata, timeout=60).code())
            self.seconds.append(time.monotonic() - start_s)


VICTIMS: dict[str, tuple[str, Message]] = {
    "store": ("GetAdapter", store_pb.GetAdapterRequest(ref="a")),
    "inference": ("GetServerInfo", inference_pb2.GetServerInfoRequest()),
}


@contextmanager
def repeated(
    service: Attacked, path: str, kind: str, token: str, body: bytes, end: str
) -> Iterator[Counter[str]]:
    """Calls again and again while the context lasts, from before it begins; yields what gets the
    codes at its end. `end`: see `repeat_calls`."""
    file = service.folder / "body"
    file.write_bytes(body)
    arguments = [service.address, token_of(token), path, kind, str(file), end]
    codes: Counter[str] = Counter()
    with forks.piped("tests.system.repeat_calls", *arguments) as running:
        assert running.stdout.readline().startswith("begun")
        yield codes
        running.stdin.close()
        output = running.stdout.read()
        assert running.wait() == 0
    for line in output.splitlines():
        number, _, code = line.partition(" ")
        codes[code] += int(number)


@pytest.mark.parametrize("end", [CANCELS, pytest.param(AWAITS, marks=pytest.mark.long)])
@pytest.mark.parametrize("attack_name", MESSAGES)
def test_work_of_one_caller_does_not_stop_others(
    request: pytest.FixtureRequest, attack_name: str, end: str
) -> None:
    """Others are answered while it goes on, and it keeps no more than its share of the memory."""
    name, token, method, make = MESSAGES[attack_name]
    service: Attacked = request.getfixturevalue(name)
    found = SERVICES[name].methods_by_name[method]
    kind = f"{'stream' if found.client_streaming else 'unary'}_stream"
    path = f"/{SERVICES[name].full_name}/{method}"
    with (
        service.grown_mib() as grown,
        repeated(service, path, kind, token, make(), end) as codes,
        Probe(service.address, name) as probe,
    ):
        until(lambda: len(probe.seconds) >= NUM_PROBES)
        seconds = sorted(probe.seconds)
    p99_s = seconds[len(seconds) * 99 // 100]
    print(f"{attack_name}: p99 {p99_s * 1e3:.0f} ms, {grown[0]:.0f} MiB, {dict(codes)}")
    assert p99_s <= MAX_VICTIM_S
    assert grown[0] <= MAX_TENANT_MIB
    assert codes.keys() <= {"OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}, codes


# --- no fault of ours --------------------------------------------------------------------------


def test_a_full_table_of_files_is_no_bug(store: Attacked) -> None:
    (store.folder / "adapter").mkdir()
    (store.folder / "adapter" / "adapter_config.json").write_text("{}")
    client = Client(store.address, token_of("victim"))

    def code(action: Callable[[], object]) -> str:
        with pytest.raises(grpc.RpcError) as raised:
            action()
        return raised.value.code().name

    assert code(lambda: client.get("a")) == "NOT_FOUND"  # the connection is there
    with store.without_files():
        codes = [
            code(lambda: client.register("a", store.folder / "adapter")),
            code(lambda: client.upload("a", {"adapter_config.json": b"{}"})),
        ]
    assert set(codes) <= {"RESOURCE_EXHAUSTED", "UNAVAILABLE"}
    assert code(lambda: client.register("a", store.folder / "adapter")) == "INVALID_ARGUMENT"
    client.close()


TEXTS = (
    *("", "a", "\0", "é" * 50, "\u2028", "sha256:" + "a" * 64, "file:///tmp", "x/y", "*"),
    *("a@99999999999999999999", "a@4294967296", "name=\U0010ffff", "x" * 5000),
)
NUMBERS: dict[int, tuple[object, ...]] = {
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 2**31, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**63, 2**64 - 1),
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_BOOL: (True,),
    FieldDescriptor.CPPTYPE_DOUBLE: (float("nan"), float("inf"), -1.0, 1e308),
    FieldDescriptor.CPPTYPE_FLOAT: (float("nan"), float("inf"), -1.0),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 99),
    FieldDescriptor.CPPTYPE_STRING: TEXTS,
}


def extremes(message_type: Descriptor) -> Iterator[dict[str, Any]]:
    """Yields messages as keyword arguments, each with one field at an extreme."""
    for field in message_type.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            values: Iterator[Any] = maps(field.message_type.fields_by_name["value"].message_type)
        elif field.message_type is not None:
            values = extremes(field.message_type)
        elif field.type == FieldDescriptor.TYPE_BYTES:
            values = iter([b"\xff" * 70])
        else:
            values = iter(NUMBERS[field.cpp_type])
        is_list = field.is_repeated and not (
            field.message_type is not None and field.message_type.GetOptions().map_entry
        )
        for value in values:
            yield {field.name: [value] if is_list else value}


def maps(value_type: Descriptor | None) -> Iterator[dict[str, Any]]:
    """Yields maps to texts, or to values of JSON, which are the only other ones in requests."""
    if value_type is None:
        yield from ({text: text} for text in TEXTS)
        return
    value = GetMessageClass(value_type)
    yield from ({text: value(string_value=text)} for text in TEXTS)
    yield {"unset": value()}
    yield from ({"number": value(number_value=each)} for each in (float("nan"), -1.0, 1e308))
    nested = value(bool_value=True)
    for _ in range(40):  # two levels each; protobuf itself reads at most 100
        nested = value(list_value={"values": [nested]})
    yield {"nested": nested}


USUAL = {"name": "a", "ref": "a", "digest": "sha256:" + "a" * 64, "source_uri": "file:///nowhere"}


def requests_of(message_type: Descriptor) -> Iterator[Message]:
    kind = GetMessageClass(message_type)
    usual = {name: text for name, text in USUAL.items() if name in message_type.fields_by_name}
    for fields in extremes(message_type):
        yield kind(**{**usual, **fields})


@both
def test_no_value_of_a_field_is_our_fault(service: Attacked, name: str) -> None:
    metadata = (("authorization", f"Bearer {token_of('root')}"),)
    slow = {"WatchAdapters", "ProfileSteps"}  # good requests take as long as they like
    wrong = []
    with grpc.insecure_channel(service.address) as channel:
        for method in SERVICES[name].methods:
            kind = f"{'stream' if method.client_streaming else 'unary'}_stream"
            call = getattr(channel, kind)(f"/{SERVICES[name].full_name}/{method.name}")
            bodies = [request.SerializeToString() for request in requests_of(method.input_type)]
            for body in (b"\x0a\xff", b"\x0b", *bodies):
                limit_s = 0.1 if method.name in slow else 5
                sent = iter([body]) if method.client_streaming else body
                code, text = end_of(call(sent, metadata=metadata, timeout=limit_s))
                if code in {"INTERNAL", "UNKNOWN"}:
                    wrong.append((method.name, body[:60], text))
    assert wrong == []


def end_of(call: Any) -> tuple[str, str]:
    """Returns the code of a call and its text; "OK" once there is an answer."""
    try:
        for _ in call:
            call.cancel()
            return "OK", ""
    except grpc.RpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""
