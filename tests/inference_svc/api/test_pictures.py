"""Pictures of a call are counted before they are decoded, and held while its requests are open."""

from __future__ import annotations

import asyncio
import hashlib
import os
import resource
import signal
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError, Future, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inference_svc.api import pictures
from inference_svc.api.pictures import CallPictures, ImageUploads, PictureReader
from inference_svc.errors import ImageNotFound
from inference_svc.pictures.decoding import Tiles
from inference_svc.pictures.fetching.fetcher import ImageFetcher
from inference_svc.pictures.fetching.hosts import parse_entry, parse_url
from inference_svc.pictures.placeholders import PictureRule
from inference_svc.pictures.processor import read_processor
from inference_svc.pictures.sizes import TileForm
from inference_svc.pictures.uploads import IDLE_SECONDS, UploadKey, Uploads
from inference_svc.text.chat import Chat, ChatMessage, MessageImage
from servicekit.errors import InvalidArgument, ShareExceeded
from servicekit.shares import Shares
from servicekit.work_budget import WorkBudget
from tests.support.pictures.files import encoded, picture
from tests.support.pictures.models import PATCH, TILE, save_processor, tile_form
from tests.support.servers.image_host import ImageHost, answer

pytestmark = pytest.mark.processes

TILE_BYTES = 3 * TILE * TILE
FORM = TileForm(TILE, PATCH, merge=2)
SALT = "salt"


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[PictureReader]:
    """At most two pictures of ten tiles each. Debts stay: on a busy machine they would be paid
    before a test looks at them."""
    save_processor("SmolVLM", tmp_path)
    rule = PictureRule(read_processor(tmp_path, FORM), 80, FORM, 2)
    made = PictureReader(
        rule, "model", Shares("prompt_image_bytes", 1 << 21, 0.5), Uploads("uploads", 1 << 20)
    )
    made.work.processors = 1e-6
    yield made
    made.close()


def chat(*files: bytes) -> Chat:
    images = tuple(MessageImage(0, data, f"image {i}") for i, data in enumerate(files))
    return Chat((ChatMessage("user", "a", images=images),))


def read(call: CallPictures, prompt: Chat) -> list[int]:
    """Returns the tiles of each picture."""

    async def body() -> list[int]:
        found = await call.of_prompt(prompt, lambda _: "<image>", "account", SALT).read()
        return [each.num_tiles for each in found]

    return asyncio.run(body())


def test_pixels_count_until_they_are_let_go_of(reader: PictureReader) -> None:
    with reader.of_call() as call:
        assert read(call, chat(encoded(picture(TILE, TILE)), encoded(picture(200, 100)))) == [10, 7]
    assert reader.pixels.used == 17 * TILE_BYTES
    call.release()
    call.release()
    assert reader.pixels.used == 0


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_small_picture_leaves_others_the_rest(tmp_path: Path, share: float) -> None:
    """Each counts as its own size while it is decoded, not as the model's largest."""
    save_processor("Qwen2VL", tmp_path, min_pixels=56 * 56, max_pixels=1 << 20)
    form = tile_form("Qwen2VL")
    rule = PictureRule(read_processor(tmp_path, form), 80, form, 8)
    assert rule.processor.max_bytes == 3 << 20
    pixels = Shares("prompt_image_bytes", 8 << 20, share)
    reader = PictureReader(rule, "model", pixels, Uploads("uploads", 1))
    small = encoded(picture(100, 80))
    with reader.of_call() as first, reader.of_call() as second:
        read(first, chat(small))
        assert len(read(second, chat(*[small] * 8))) == 8
        first.release()
        second.release()
    reader.close()
    assert reader.pixels.use().num_refused == 0


def test_small_pictures_count_as_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may open so many: a quarter of them may have pixels."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (400, 400))
    save_processor("Llava", tmp_path)
    rule = PictureRule(read_processor(tmp_path, FORM), 80, FORM, 2)
    pixels = Shares("prompt_image_bytes", 100 << 20, 0.5)
    reader = PictureReader(rule, "model", pixels, Uploads("uploads", 1))
    with reader.of_call() as call:
        read(call, chat(encoded(picture(TILE, TILE)), encoded(picture(200, 100))))
    assert reader.pixels.used == 2 << 20
    call.release()
    reader.close()


def test_a_stream_that_nobody_reads_holds_nothing(reader: PictureReader) -> None:
    with reader.of_call() as call:
        read(call, chat(encoded(picture(9, 9))))
    assert reader.pixels.used > 0
    del call
    assert reader.pixels.used == 0


def test_a_call_that_fails_holds_nothing(reader: PictureReader) -> None:
    with pytest.raises(InvalidArgument, match="image 1: is no picture"), reader.of_call() as call:
        read(call, chat(encoded(picture(9, 9)), b"none"))
    assert reader.pixels.used == 0


def test_an_account_holds_no_more_than_its_share(reader: PictureReader) -> None:
    large, other = (encoded(picture(TILE * 3, TILE * 3, seed=seed)) for seed in range(2))
    reader.pixels = Shares("prompt_image_bytes", 30 * TILE_BYTES, 0.5)
    share = 15 * TILE_BYTES
    with reader.of_call() as call:
        assert read(call, chat(large)) == [10]
        assert share // 2 < reader.pixels.used <= share
        call.release()
    most = f"maximum of {share}: send fewer or smaller images"
    with pytest.raises(ShareExceeded, match=most) as refused, reader.of_call() as call:
        read(call, chat(large, other))
    assert not refused.value.retry_after_s
    assert reader.pixels.used == 0


def test_a_cancelled_call_holds_its_memory_until_its_file_is_let_go_of(
    reader: PictureReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is stopped, so that it would take all of its time."""
    call, prompt = CallPictures(reader), chat(encoded(picture(9, 9)))
    assert reader.decoder is not None
    with reader.decoder.pool.process() as child:
        pass
    decode = reader.decode

    def decode_stopped(*args: Any) -> Future[Tiles]:
        os.kill(child.pid, signal.SIGSTOP)
        return decode(*args)

    monkeypatch.setattr(reader, "decode", decode_stopped)

    async def body() -> Future[Tiles]:
        reading = asyncio.create_task(call.read(prompt.images, "account"))
        while not reader.pixels.used or call.decoding is None or not call.decoding.running():
            await asyncio.sleep(0.001)
        decoding = call.decoding
        reading.cancel()
        await asyncio.wait({reading})
        return decoding

    decoding = asyncio.run(body())
    call.release()
    num_bytes = reader.pixels.used
    assert num_bytes == TILE_BYTES * 10 or decoding.done()
    assert isinstance(decoding.exception(5.0), CancelledError)
    reader.close()  # its threads have ended, and with them the callbacks
    assert reader.pixels.used == 0


@pytest.fixture
def host() -> Iterator[ImageHost]:
    with ImageHost() as made:
        yield made


class FetchedCall:
    """A call whose image is fetched from a host, which holds more than that of each resource."""

    def __init__(self, reader: PictureReader, host: ImageHost) -> None:
        self.reader = reader
        self.memory = Shares("request_bytes", 64 << 20, 0.5)
        self.fetches = Shares("prompt_image_fetches", 4, 0.5)
        allowed = frozenset({parse_entry(f"http://{host.address}")})
        tls = ssl.create_default_context()
        reader.fetcher = ImageFetcher(allowed, tls, self.fetches, self.memory, lambda _: None)
        location = parse_url(host.url("/a"))
        image = MessageImage(0, b"", "image 0", location=location)
        file = uploaded(reader, encoded(picture(5, 5))).images[0]
        held = reader.uploads.hold(UploadKey("account", SALT, file.sha256))
        assert held is not None
        self.file = held
        self.prompt = Chat((ChatMessage("user", "a", images=(image, file)),))

    def cancelled_when(self, is_time: Callable[[CallPictures], bool]) -> Future[Any] | None:
        """Cancels the call when it is time. Returns the work on a file that goes on."""

        async def body(call: CallPictures) -> Future[Any] | None:
            found = call.of_prompt(self.prompt, lambda _: "<image>", "account", SALT)
            assert self.file.num_holders == 2
            reading = asyncio.create_task(found.read())
            async with asyncio.timeout(60.0):
                while not is_time(call):
                    await asyncio.sleep(0.001)
            decoding = call.decoding
            reading.cancel()
            await asyncio.wait({reading})
            assert reading.cancelled()
            return decoding

        with self.reader.of_call() as call:
            decoding = asyncio.run(body(call))
            call.release()
        return decoding

    def check_nothing_is_held(self) -> None:
        used = [each.used for each in (self.memory, self.fetches, self.reader.pixels)]
        assert used == [0, 0, 0]
        assert self.file.num_holders == 1


def test_a_call_that_is_cancelled_while_it_fetches_holds_nothing(
    reader: PictureReader, host: ImageHost
) -> None:
    data = encoded(picture(9, 9))

    async def half(writer: asyncio.StreamWriter) -> None:
        writer.write(answer(data[:10], length=len(data)))
        await asyncio.sleep(60.0)

    host.files["/a"] = half
    call = FetchedCall(reader, host)
    assert call.cancelled_when(lambda _: call.memory.used == len(data)) is None
    call.check_nothing_is_held()


def test_a_fetch_that_fails_is_charged(reader: PictureReader, host: ImageHost) -> None:
    call = FetchedCall(reader, host)
    host.files["/a"] = answer(b"", status="404 Not Found")
    with pytest.raises(InvalidArgument, match="answers 404"), reader.of_call() as pictures:
        read(pictures, call.prompt)
    assert reader.work.debt_s("account") > 0
    call.check_nothing_is_held()


@pytest.mark.parametrize("step", ["measure", "decode"])
def test_a_call_that_is_cancelled_while_it_decodes_holds_its_files_until_they_are_let_go_of(
    reader: PictureReader, host: ImageHost, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encoded(picture(9, 9))
    host.files["/a"] = answer(data)
    call = FetchedCall(reader, host)
    is_decoding, may_end = threading.Event(), threading.Event()
    assert reader.decoder is not None
    work = getattr(reader.decoder, step)

    def wait_and_work(*args: Any) -> Any:
        is_decoding.set()
        assert may_end.wait(60.0)
        return work(*args)

    monkeypatch.setattr(reader.decoder, step, wait_and_work)
    decoding = call.cancelled_when(lambda _: is_decoding.is_set())
    assert decoding is not None
    assert call.memory.used == len(data)
    assert call.file.num_holders == 2
    assert (call.reader.pixels.used > 0) == (step == "decode")
    assert call.fetches.used == 0
    may_end.set()
    assert wait([decoding], 60.0).done
    reader.close()  # its threads have ended, and with them the callbacks
    call.check_nothing_is_held()


def test_decoding_is_charged_and_waits_for_its_debt(reader: PictureReader) -> None:
    with reader.of_call() as call:
        read(call, chat(encoded(picture(9, 9))))
    assert reader.work.debt_s("account") > 0
    reader.work.charge("account", 100.0)
    reader.work.wait_s = 0.01
    call.release()
    with pytest.raises(ShareExceeded, match="image_work"), reader.of_call() as call:
        read(call, chat(b"none"))
    assert reader.pixels.used == 0


def test_each_file_has_turns_of_its_own(
    reader: PictureReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To be hashed, because another one is as long; for its header; and to be decoded."""
    turn, num_turns = reader.work.turn, 0

    def counted(account: str) -> Any:
        nonlocal num_turns
        num_turns += 1
        return turn(account)

    monkeypatch.setattr(reader.work, "turn", counted)
    files = [encoded(picture(9, 9, seed=seed)) for seed in range(2)]
    length = sum(map(len, files))
    with reader.of_call() as call:
        read(call, chat(*(each + bytes(length - len(each)) for each in files)))
    assert num_turns == 3 * len(files)


@pytest.fixture
def decoded(reader: PictureReader, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are decoded from now on."""
    return noted(reader, "decode", monkeypatch)


@pytest.fixture
def measured(reader: PictureReader, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are measured from now on."""
    return noted(reader, "measure", monkeypatch)


def noted(reader: PictureReader, method: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the list to which each call of a reader's method adds its file from now on."""
    found: list[str] = []
    call = getattr(reader, method)

    def noting(image: MessageImage, *args: Any) -> Future[Any]:
        found.append(image.where)
        result: Future[Any] = call(image, *args)
        return result

    monkeypatch.setattr(reader, method, noting)
    return found


def test_equal_files_are_read_once_and_share_their_pixels(
    reader: PictureReader, measured: list[str], decoded: list[str]
) -> None:
    """However their bytes have come; each other file has its own, also of the same length."""
    one, other = encoded(picture(9, 9)), encoded(picture(9, 9, seed=2))
    length = len(one) + len(other)
    padded = [each + bytes(length - len(each)) for each in (one, other)]
    sha256 = hashlib.sha256(one).digest()
    by_hash = [MessageImage(0, copied(one), f"hash {i}", sha256) for i in range(2)]
    of_bytes = chat(one, copied(one), one).images
    for images, expected in (
        (of_bytes[:2], ["image 0"]),
        (by_hash, ["hash 0"]),
        ((by_hash[0], of_bytes[1]), ["hash 0"]),
        (chat(one, other).images, ["image 0", "image 1"]),
        (chat(*padded).images, ["image 0", "image 1"]),
        ((of_bytes[0], *chat(one, other).images[1:], of_bytes[2]), ["image 0", "image 1"]),
    ):
        measured.clear()
        decoded.clear()
        call = CallPictures(reader)
        found = asyncio.run(call.read(images, "account"))
        assert len(found) == len(images)
        assert measured == decoded == expected
        each_once = {id(tiles.pixels): tiles for tiles in found}.values()
        assert len(each_once) == len(expected)
        assert reader.pixels.used == sum(tiles.pixels.num_bytes for tiles in each_once)
        alone = CallPictures(reader)
        for image, tiles in zip(images, found, strict=True):
            assert asyncio.run(alone.read([image], "account"))[0].digest == tiles.digest
        alone.release()
        call.release()
        assert reader.pixels.used == 0


def copied(data: bytes) -> bytes:
    return bytes(bytearray(data))


def test_each_file_is_measured_in_a_turn_of_its_own(
    reader: PictureReader, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is paid for, the thread's time also, before the next one is read."""
    charge, charged = reader.work.charge, []

    def charge_much(account: str, work_s: float) -> None:
        charged.append(work_s)
        charge(account, 100.0)

    monkeypatch.setattr(reader.work, "charge", charge_much)
    reader.work.wait_s = 0.01
    images = chat(encoded(picture(9, 9)), encoded(picture(8, 8))).images
    with pytest.raises(ShareExceeded, match="image_work"), reader.of_call() as call:
        asyncio.run(call.read(images, "account"))
    assert measured == ["image 0"]
    assert len(charged) == 2, "the process's time, and the thread's"


STOP_SECONDS = 1.0


def test_only_turns_on_a_processor_are_charged(reader: PictureReader) -> None:
    """On a machine that is busy with steps, a file takes several times as long as its work."""
    assert reader.decoder is not None
    with reader.decoder.pool.process() as child:
        os.kill(child.pid, signal.SIGSTOP)
    go_on = threading.Timer(STOP_SECONDS, os.kill, (child.pid, signal.SIGCONT))
    go_on.start()
    with reader.of_call() as call:
        read(call, chat(encoded(picture(9, 9))))
    assert child.cpu_seconds > 0
    assert 0 < reader.work.debt_s("account") < STOP_SECONDS / 2
    call.release()


def test_too_many_are_refused_before_any_is_decoded(reader: PictureReader) -> None:
    with pytest.raises(InvalidArgument, match=r"image 2: .*at most 2 images"):
        read(CallPictures(reader), chat(b"none", b"none", b"none"))


def test_a_server_of_text_refuses_them_by_name() -> None:
    pixels, uploads = Shares("prompt_image_bytes", 1), Uploads("uploads", 1)
    reader = PictureReader(None, "acme", pixels, uploads)
    with pytest.raises(InvalidArgument, match="image 0: acme reads no images") as refused:
        read(CallPictures(reader), chat(b"any"))
    assert refused.value.subject == "image 0"
    assert read(CallPictures(reader), chat()) == []


def uploaded(reader: PictureReader, data: bytes, account: str = "account") -> Chat:
    """A chat with an image that was uploaded, and is named by its hash."""
    with reader.uploads.begin(account, len(data)) as file:
        file.add(data)
        sha256 = file.keep(SALT)
    image = MessageImage(0, b"", "image 0", sha256)
    return Chat((ChatMessage("user", "a", images=(image,)),))


def test_an_uploaded_file_is_held_until_it_is_decoded(reader: PictureReader) -> None:
    prompt = uploaded(reader, encoded(picture(TILE, TILE)))
    [image] = prompt.images
    file = reader.uploads.hold(UploadKey("account", SALT, image.sha256))
    assert file is not None
    with reader.of_call() as call:
        found = call.of_prompt(prompt, lambda _: "<image>", "account", SALT)
        assert file.num_holders == 2
        assert [each.num_tiles for each in asyncio.run(found.read())] == [10]
        assert file.num_holders == 1
    call.release()
    again = CallPictures(reader)
    again.of_prompt(prompt, lambda _: "<image>", "account", SALT)
    assert file.num_holders == 2
    again.release()  # before it is decoded
    assert file.num_holders == 1
    reader.uploads.let_go(file)
    reader.uploads.check_integrity()


def test_a_hash_of_others_is_as_unknown_as_any(reader: PictureReader) -> None:
    prompt = uploaded(reader, encoded(picture(9, 9)), "neighbour")
    unknown = Chat(
        (ChatMessage("user", "a", images=(MessageImage(0, b"", "image 0", b"x" * 32),)),)
    )
    words = []
    for each, account, salt in (
        (prompt, "account", SALT),
        (prompt, "neighbour", ""),
        (unknown, "account", SALT),
    ):
        with pytest.raises(ImageNotFound) as refused, reader.of_call() as call:
            call.of_prompt(each, lambda _: "<image>", account, salt)
        assert refused.value.subject == "image 0"
        words.append(str(refused.value))
    assert len(set(words)) == 1
    assert "upload it again" in words[0]
    with reader.of_call() as call:
        call.of_prompt(prompt, lambda _: "<image>", "neighbour", SALT)
    call.release()


def test_each_message_of_an_upload_is_charged(reader: PictureReader) -> None:
    work = WorkBudget("work", 0.5, processors=1e-6)
    principal: Any = SimpleNamespace(account="account")

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield b"a"

    asyncio.run(ImageUploads(reader, work).receive(principal, 1000, "", chunks()))
    assert work.debt_s("account") > 0.05


def test_files_that_nobody_uses_are_deleted_without_a_call(
    reader: PictureReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "EXPIRY_SECONDS", 0.01)
    now_s = 0.0
    reader.uploads = Uploads("uploads", 1 << 20, clock=lambda: now_s)
    uploads = ImageUploads(reader, WorkBudget("work", 1.0))
    principal: Any = SimpleNamespace(account="account")

    async def chunks() -> AsyncIterator[bytes]:
        yield b"a"

    async def body() -> None:
        nonlocal now_s
        await uploads.receive(principal, 1, "", chunks())
        assert reader.uploads.use().used
        now_s = IDLE_SECONDS
        async with asyncio.timeout(60.0):
            while reader.uploads.use().used:
                await asyncio.sleep(0.01)

    asyncio.run(body())
