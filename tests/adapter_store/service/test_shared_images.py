"""Images that are handed over as files, by real stores over real channels and sockets."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import resource
import signal
import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from adapter_store.images import pull, share
from contract.images.header import ImageHeader, ImageTrailer, trailer_sha256
from contract.images.sharing import (
    ADD_SEALS,
    GIVEN,
    GREETING,
    SEAL_SEAL,
    SEALS,
    TICKET_BYTES,
)
from inference_svc.adapters.pulls.registration import Registrations
from inference_svc.errors import CorruptImage, StoreUnavailable
from inference_svc.store import shared_images
from inference_svc.store.shared_images import PullCall, ShareSocket
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from servicekit.errors import ShareExceeded
from tests.adapter_store.service.receivers import (
    Receiver,
    ask,
    greeted,
    until_released,
    until_sealed,
)
from tests.support.inference.memory_store import MemoryRegistrar
from tests.support.store.adapters import make_large
from tests.support.wait import until

pytestmark = pytest.mark.slow

DATA = bytes(range(256)) * 256


@pytest.fixture
def ready(serve, path, make_adapter, make_layout):
    """ready(**settings) -> (store, the key of an image in its memory, its bytes)"""

    def start(**settings):
        store = serve(share_socket=path, lock_images="off", **settings)
        key = make_large(store.client, make_adapter, make_layout, features=1 << 15)
        store.idle()
        data = store.client.pull(*key).data
        store.run(store.running.store.images.wait_idle())  # a spare buffer is a file, too
        until(lambda: not store.running.store.use_cases.pulls.num_active)  # else it is in use
        return store, key, data

    return start


def num_open(path: Path) -> int:
    """How many descriptors of images this process has, and connections of the store's socket."""
    images = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            images += "memfd:loadout-image" in os.readlink(f"/proc/self/fd/{number}")
    return images + Path("/proc/net/unix").read_text().count(str(path.parent))


def test_an_image_is_shared_again_and_again(ready, receive, path):
    store, key, data = ready()
    receiver = receive(store.running.grpc_address, path)
    assert receiver.pull(*key) == data
    until_released(store)
    before = num_open(path)
    for _ in range(20):
        assert receiver.pull(*key) == data
    assert receiver.ways() == {"shared"}
    until_released(store)
    until(lambda: num_open(path) <= before)
    assert store.client.pull(*key).data == data  # for others it is a stream as ever
    assert oct(path.stat().st_mode & 0o777) == "0o600"


@pytest.mark.parametrize("error", ["", "CUDA error 801"])
def test_an_image_is_registered_where_it_is_mapped(ready, receive, path, error):
    """And unmapped once it is copied, or at once if the device refuses it."""
    store, key, data = ready()
    registrar = MemoryRegistrar(error)
    registrations = Registrations(registrar, min_bytes=0)
    receiver = receive(store.running.grpc_address, path, registrations)
    before = num_open(path)
    for _ in range(5):
        assert receiver.pull(*key) == data
    assert receiver.ways() == {"shared"}
    until_released(store)
    until(lambda: not registrations.num_images)
    assert not registrar.registered
    assert (registrar.num_registered, registrations.results()["failed"]) == (
        (0, 5) if error else (5, 0)
    )
    until(lambda: num_open(path) <= before)


def test_a_lie_is_not_registered_for_long(ready, receive, path):
    store, key, data = ready()
    connection, share_id = greeted(path)
    connection.close()
    registrar = MemoryRegistrar()
    registrations = Registrations(registrar, min_bytes=0)
    receiver = receive(store.running.grpc_address, path, registrations)
    lie = sealed(data[:-1] + bytes([data[-1] ^ 1]), SEALS | SEAL_SEAL)
    with impostor(path, share_id, lie), pytest.raises(CorruptImage, match="sha256"):
        receiver.pull(*key)
    until(lambda: not registrations.num_images)
    assert registrar.num_registered == 2, "once for each attempt"
    assert not registrar.registered


def test_what_cannot_be_shared_is_streamed(ready, receive, path, make_adapter, make_layout, serve):
    store, key, data = ready()
    address = store.running.grpc_address
    small = store.client.register("small", make_adapter(folder="small")).adapter.digest
    layout_id = store.client.register_layout(make_layout())
    expected = store.client.pull(small, layout_id).data
    receiver = receive(address, path)
    assert receiver.pull(small, layout_id) == expected
    assert receiver.ways() == {"small"}

    nowhere = receive(address, path.with_name("nothing"))
    assert nowhere.pull(*key) == data
    assert nowhere.ways() == {"unreachable"}

    other = path.with_name("other.sock")
    serve(share_socket=other, lock_images="off", data_dir=path.with_name("data"))
    confused = receive(address, other)
    assert confused.pull(*key) == data
    assert confused.ways() == {"other_store"}
    unaware = receive(address, None)
    assert unaware.pull(*key) == data
    assert unaware.ways() == set()


def take(connection: socket.socket, ticket: bytes) -> list[int]:
    """The files that the store gives for a ticket."""
    connection.sendall(ticket)
    answer, files, _, _ = socket.recv_fds(connection, 1, 2)
    assert bool(files) == (answer == GIVEN)
    return files


def test_a_ticket_is_for_one_file_that_nobody_can_change(ready, path, monkeypatch):
    monkeypatch.setattr(share, "STRANGER_SECONDS", 600)  # else they may end before their turn
    monkeypatch.setattr(pull, "TAKE_SECONDS", 600)
    store, key, data = ready()
    until_sealed(store, key, path)
    connection, share_id = greeted(path)
    call, header = ask(store, key, share_id)
    assert (len(header.share_ticket), header.not_shared) == (TICKET_BYTES, "")
    (file,) = take(connection, header.share_ticket)
    assert os.pread(file, len(data) + 1, 0) == data
    for change in (
        lambda: os.pwrite(file, b"x", 0),
        lambda: os.ftruncate(file, 0),
        lambda: os.ftruncate(file, len(data) + 1),
        lambda: mmap.mmap(file, len(data), mmap.MAP_SHARED, mmap.PROT_WRITE),
        lambda: fcntl.fcntl(file, ADD_SEALS, 0),
    ):
        with pytest.raises(PermissionError):
            change()
    again, _ = greeted(path)
    assert take(again, header.share_ticket) == []
    call.cancel()
    until_released(store)
    late, _ = greeted(path)
    call, header = ask(store, key, share_id)
    call.cancel()
    until_released(store)
    assert take(late, header.share_ticket) == []
    assert os.pread(file, len(data), 0) == data  # who has it keeps it
    os.close(file)
    for each in (connection, again, late):
        each.close()


def test_strangers_are_few_and_known(ready, receive, path, monkeypatch):
    monkeypatch.setattr(share, "MAX_STRANGERS", 4)
    store, key, data = ready()
    held = [greeted(path)[0] for _ in range(4)]
    with pytest.raises(OSError):
        greeted(path)
    held[0].sendall(b"?" * TICKET_BYTES)
    assert held[0].recv(1) == b"-"
    for each in held:
        each.close()
    receiver = receive(store.running.grpc_address, path)
    until(lambda: receiver.pull(*key) == data and receiver.ways() == {"shared"})

    monkeypatch.setattr(share, "user_of", lambda peer: 12345)
    with pytest.raises(OSError):
        greeted(path)
    monkeypatch.undo()
    monkeypatch.setattr(share, "STRANGER_SECONDS", 0.1)
    idle, _ = greeted(path)
    assert idle.recv(1) == b""
    idle.close()


def test_one_account_has_its_share_of_files(ready, path, monkeypatch):
    monkeypatch.setattr(share, "MAX_OFFERS", 16)
    monkeypatch.setattr(pull, "TAKE_SECONDS", 600)  # else the first may end before the last asks
    store, key, _ = ready()
    until_sealed(store, key, path)
    connection, share_id = greeted(path)
    connection.close()
    before = num_open(path)
    calls = [ask(store, key, share_id) for _ in range(200)]
    reasons = [header.not_shared for _, header in calls]
    assert reasons.count("") == 16
    assert set(reasons) == {"", "too_many"}
    files = []
    for _, header in calls[:16]:
        mine, _ = greeted(path)
        files += [*take(mine, header.share_ticket), mine.detach()]
    for call, _ in calls:
        call.cancel()
    until_released(store)
    for file in files:
        os.close(file)
    until(lambda: num_open(path) <= before)
    until(lambda: not store.running.store.use_cases.pulls.num_active)


def test_one_tenant_maps_a_thousand_images_and_others_still_one(path):
    """Each is mapped for as long as its receiver likes. All take files of this process."""

    def receive(offers: share.Offers, offer: share.Offer) -> tuple[socket.socket, mmap.mmap]:
        connection, share_id = greeted(path)
        assert share_id == offers.share_id
        (file,) = take(connection, offer.ticket)
        try:
            return connection, mmap.mmap(file, len(DATA), mmap.MAP_PRIVATE, mmap.PROT_READ)
        finally:
            os.close(file)

    async def main() -> None:
        offers = share.Offers(0.5)
        listening = share.ShareSocket(path, frozenset(), offers)
        file = sealed(DATA, SEALS)
        before = num_open(path)
        with ExitStack() as held:
            mapped, num_refused = [], 0
            for _ in range(1000):
                try:
                    offer = held.enter_context(offers.offer(file, "acme"))
                except ShareExceeded:
                    num_refused += 1
                else:
                    mapped.append(await asyncio.to_thread(receive, offers, offer))
            assert len(mapped) == offers.places.capacity // 2 == 1000 - num_refused
            offer = held.enter_context(offers.offer(file, "zeta"))
            mapped.append(await asyncio.to_thread(receive, offers, offer))
        os.close(file)  # the image is gone from the store
        assert all(mapping[:] == DATA for _, mapping in mapped)
        assert offers.places.used == 0
        for connection, mapping in mapped:
            mapping.close()
            connection.close()
        await listening.close()
        assert num_open(path) < before  # nor the socket itself

    asyncio.run(main())


def test_mappings_leave_files_for_the_rest_of_the_store(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert share.Offers().places.capacity == 256
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert share.Offers().places.capacity == share.MAX_OFFERS


def sealed(data: bytes, seals: int) -> int:
    file = os.memfd_create("made", os.MFD_ALLOW_SEALING)
    os.write(file, data)
    fcntl.fcntl(file, ADD_SEALS, seals)
    return file


@contextmanager
def impostor(path: Path, share_id: bytes, file: int):
    """Listens in the store's place, and gives this file for every ticket."""
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listening, ThreadPoolExecutor(1) as thread:
        listening.bind(str(path))
        listening.listen()

        def answer() -> None:
            while True:
                try:
                    peer, _ = listening.accept()
                except OSError:
                    return
                with peer:
                    peer.sendall(GREETING + share_id)
                    if peer.recv(TICKET_BYTES):
                        socket.send_fds(peer, [GIVEN], [file])
                        peer.recv(1)

        thread.submit(answer)
        try:
            yield
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            os.close(file)


def is_open(found: os.stat_result) -> bool:
    """Whether this process has a descriptor of a file."""
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.path.samestat(os.stat(int(number)), found):
                return True
    return False


def test_files_of_an_impostor_are_not_believed(ready, receive, path, tmp_path, monkeypatch):
    """Nor does a program that another thread starts have them."""
    mapped, inherited = shared_images._map, []

    def note(file: int, num_bytes: int) -> mmap.mmap:
        inherited.append(os.get_inheritable(file))
        return mapped(file, num_bytes)

    monkeypatch.setattr(shared_images, "_map", note)
    store, key, data = ready()
    connection, share_id = greeted(path)
    connection.close()
    on_disk = tmp_path / "file"
    on_disk.write_bytes(data)
    pipe, end = os.pipe()
    os.close(end)
    for file, reason in (
        (sealed(data, SEALS & ~8), "unsealed"),  # it can be written to
        (sealed(data, 0), "unsealed"),
        (os.open(on_disk, os.O_RDWR), "unsealed"),
        (pipe, "unsealed"),
        (sealed(data[:-1], SEALS), "wrong_size"),
        (sealed(data + b"x", SEALS), "wrong_size"),
        (sealed(b"", SEALS), "wrong_size"),
    ):
        receiver, found = receive(store.running.grpc_address, path), os.fstat(file)
        with impostor(path, share_id, file):
            assert receiver.pull(*key) == data
            assert receiver.ways() == {reason}
        assert not is_open(found)
    lie = sealed(data[:-1] + bytes([data[-1] ^ 1]), SEALS | SEAL_SEAL)
    receiver = receive(store.running.grpc_address, path)
    with impostor(path, share_id, lie), pytest.raises(CorruptImage, match="sha256"):
        receiver.pull(*key)
    assert inherited
    assert not any(inherited)


class LyingCall:
    """A store's answer to a call: any serialized messages, after a header with a ticket."""

    def __init__(self, messages: Iterable[bytes]) -> None:
        self.messages = messages

    def __iter__(self):
        return iter(self.messages)

    def cancel(self) -> None:
        pass


def test_a_lying_header_maps_nothing_that_it_should_not(ready, path):
    store, key, data = ready()
    connection, share_id = greeted(path)
    beyond = pb.LayerEnd(end_offset=len(data) + 1)
    for lie, error in (
        ({"total_bytes": 1 << 62}, None),
        ({"share_ticket": b"short"}, None),
        ({}, "hands over as a file"),
        ({}, "ends at"),
        ({"ends": [beyond], "trailer": pb.ImageTrailer()}, "ends at"),
    ):
        call, header = ask(store, key, share_id)
        header.MergeFrom(pb.ImageHeader(**lie))
        after = pb.PullAdapterResponse(chunk=pb.ImageChunk(data=b"x"))
        if error == "ends at":
            after = pb.PullAdapterResponse(layer_end=beyond)
        answers = [pb.PullAdapterResponse(header=header), after]
        first = LyingCall([answer.SerializeToString() for answer in answers])
        ways: list[str] = []
        calls = iter([first, LyingCall([])])
        pull = PullCall(
            lambda _, calls=calls: next(calls), ShareSocket(path, ways.append), can_share=True
        )
        if error is None:
            assert list(pull.messages()) == []  # the other call's
            assert ways in (["wrong_size"], ["refused"])
        else:
            with pytest.raises(CorruptImage, match=error):
                list(pull.messages())
            assert ways == ["shared"]
        call.cancel()
        until_released(store)
    connection.close()


def test_ends_in_the_header_are_the_messages_that_would_follow(ready, path):
    store, key, data = ready()
    connection, share_id = greeted(path)
    connection.close()
    told = []
    for wants_ends in (True, False):  # earlier releases send and read them one by one
        request = pb.PullAdapterRequest(
            digest=key[0], layout_id=key[1], share_id=share_id, wants_ends=wants_ends
        )
        answers = store.client.stub.PullAdapter(request)
        raw = (message.SerializeToString() for message in answers)
        pull = PullCall(
            lambda _, raw=raw: LyingCall(raw), ShareSocket(path, told.append), can_share=True
        )
        header, *ends, trailer = pull.messages()
        assert isinstance(header, ImageHeader)
        assert (header.ends, header.trailer) == ((), None)
        assert [end.part for end in ends] == list(range(len(ends)))
        assert ends[-1].end_offset == header.total_bytes == len(data)
        hashes = [end.sha256 for end in ends]
        assert trailer.sha256 == trailer_sha256(hashes, header.segments)
    assert told == ["shared"] * 2
    until_released(store)


def test_a_cancelled_pull_ends_though_all_messages_are_here(ready, path):
    store, key, _ = ready()
    receiver = Receiver(store.running.grpc_address, path)
    stream = receiver.client.pull(*key)
    messages = iter(stream)
    assert isinstance(next(messages), ImageHeader)
    stream.cancel()
    with pytest.raises(StoreUnavailable):
        next(messages)
    receiver.close()
    until_released(store)


@pytest.mark.processes
def test_a_killed_store_leaves_its_files_to_who_maps_them(
    spawn, serve, connect, path, receive, make_adapter, make_layout
):
    store = spawn("--share-socket", str(path))
    address = store.wait_until_ready()["grpc"]
    client = connect(address)
    key = make_large(client, make_adapter, make_layout, features=1 << 15)
    data = client.pull(*key).data
    receiver = receive(address, path)
    until(lambda: receiver.pull(*key) == data and receiver.ways() == {"shared"})
    messages = receiver.client.pull(*key)
    stream = iter(messages)
    header = next(stream)
    assert isinstance(header, ImageHeader)
    image = messages.mapped
    assert image is not None
    store.end(signal.SIGKILL)
    copied = bytearray(len(data))
    image.copy(0, memoryview(copied))
    assert copied == image.data == data
    assert isinstance([*stream][-1], ImageTrailer), "its ends were in the header"
    assert path.is_socket()  # nobody listens there any more
    again = serve(share_socket=path, lock_images="off")
    back = receive(again.running.grpc_address, path)
    until(lambda: back.pull(*key) == data and back.ways() == {"shared"})
