"""Images are fetched from a real host over TLS: from allowed ones at checked addresses, within
bounds of bytes, time and number; nothing of an answer is in an error."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from inference_svc.errors import ImageFetchFailed
from inference_svc.pictures.fetching import exchange, fetcher
from inference_svc.pictures.fetching.exchange import MAX_HEAD_BYTES, Outcome, ask
from inference_svc.pictures.fetching.fetcher import ImageFetcher, make_context
from inference_svc.pictures.fetching.hosts import Wanted, parse_entry, parse_url
from servicekit.errors import InvalidArgument, InvalidSetting, ShareExceeded
from servicekit.shares import Reservation, Shares
from tests.support.access.certificates import Authority
from tests.support.servers.image_host import ImageHost, answer, chunked

pytestmark = pytest.mark.processes

NAME = "images.test"
SECRET = b"secret of an internal service"
IMAGE = bytes(range(256)) * 300
MIB = 1 << 20


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def host(authority: Authority) -> Iterator[ImageHost]:
    with ImageHost(authority, NAME) as made:
        made.files["/a.png"] = answer(IMAGE, "Content-Type: text/html")
        yield made


class Fetching:
    """A fetcher, with what it counts, and a call of it."""

    def __init__(
        self,
        ca_file: Path,
        *entries: str,
        lookup: Callable[[str, int], Sequence[str]] | None = None,
        memory: Shares | None = None,
    ) -> None:
        self.outcomes: list[Outcome] = []
        setting = "--request-memory"
        self.memory = memory or Shares("request_bytes", 64 * MIB, 0.5, setting=setting)
        self.fetches = Shares("prompt_image_fetches", 4, 0.5)
        self.charged_s = 0.0
        self.fetcher = ImageFetcher(
            frozenset(map(parse_entry, entries)),
            make_context(ca_file),
            self.fetches,
            self.memory,
            self.outcomes.append,
            lookup=lookup or _no_lookup,
        )

    async def fetch(self, *urls: str) -> list[bytes]:
        """Returns the images of a call, once for each URL."""
        try:
            return await self.fetch_alone(*urls)
        finally:
            assert self.memory.used_by("account") == self.fetches.used == 0

    async def fetch_alone(self, *urls: str) -> list[bytes]:
        """Like `fetch`, while other calls may run."""
        wanted = [Wanted(parse_url(url), f"image {index}") for index, url in enumerate(urls)]
        places: list[Reservation] = []
        try:
            found = await self.fetcher.fetch(wanted, "account", places, self._charge)
            assert sum(each.amount for each in places) == sum(map(len, found))
            return found
        finally:
            for each in places:
                each.release()

    def run(self, *urls: str) -> list[bytes]:
        return asyncio.run(self.fetch(*urls))

    def _charge(self, work_s: float) -> None:
        self.charged_s += work_s


def _no_lookup(host: str, port: int) -> Sequence[str]:
    raise AssertionError(f"{host} is looked up")


@pytest.fixture
def fetching(authority: Authority, host: ImageHost) -> Fetching:
    return Fetching(authority.path, host.address)


def test_images_come_in_order_and_are_held_until_they_are_read(
    fetching: Fetching, host: ImageHost
) -> None:
    host.files["/b.png"] = chunked(IMAGE[:1000], IMAGE[1000:5000])
    assert fetching.run(host.url("/a.png"), host.url("/b.png")) == [IMAGE, IMAGE[:5000]]
    assert fetching.outcomes == [Outcome.DONE] * 2
    work_s = 2 * fetcher.FETCH_WORK_SECONDS + (len(IMAGE) + 5000) / fetcher.BYTES_PER_SECOND
    assert fetching.charged_s == pytest.approx(work_s)


def test_the_host_learns_nothing_but_the_url(fetching: Fetching, host: ImageHost) -> None:
    host.requests.clear()
    fetching.run(host.url("/a.png?key=%20b"))
    [head] = host.requests
    assert head.split("\r\n")[:2] == ["GET /a.png?key=%20b HTTP/1.1", f"Host: {host.address}"]
    names = {line.partition(":")[0].lower() for line in head.split("\r\n")[1:] if line}
    assert names == {"host", "user-agent", "accept", "accept-encoding", "connection"}


def test_proxies_of_the_environment_are_not_used(
    fetching: Fetching, host: ImageHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert fetching.run(host.url("/a.png")) == [IMAGE]


@pytest.mark.parametrize("url", ["https://evil.example/a", "http://{}/a", "https://127.0.0.1/a"])
def test_other_hosts_ports_and_schemes_are_not_allowed(
    fetching: Fetching, host: ImageHost, url: str
) -> None:
    host.requests.clear()
    with pytest.raises(InvalidArgument, match=r"image 0: .*fetches nothing.*--image-hosts"):
        fetching.run(url.format(host.address))
    assert fetching.outcomes == [Outcome.NOT_ALLOWED]
    assert fetching.charged_s == 0
    assert not host.requests


async def _drip(writer: asyncio.StreamWriter) -> None:
    writer.write(answer(b"", length=1000))
    for _ in range(1000):
        writer.write(b"a")
        await writer.drain()
        await asyncio.sleep(0.02)


async def _flood(writer: asyncio.StreamWriter) -> None:
    """More than a call may have, without its length."""
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(48):
        writer.write(b"10000\r\n" + bytes(1 << 16) + b"\r\n")
        await writer.drain()


FINAL: dict[str, tuple[bytes | Callable[..., object], Outcome, str]] = {
    "redirect": (
        answer(SECRET, f"Location: https://169.254.169.254/{SECRET.decode()}", status="302 Found"),
        Outcome.REDIRECT,
        "answers 302, and the server follows no redirects",
    ),
    "missing": (answer(SECRET, status="404 " + SECRET.decode()), Outcome.STATUS, "answers 404"),
    "partial": (answer(SECRET, status="206 Partial"), Outcome.STATUS, "answers 206"),
    "compressed": (answer(SECRET, "Content-Encoding: gzip"), Outcome.PROTOCOL, "compressed"),
    "announced": (answer(b"", length=2 * MIB + 1), Outcome.SIZE, "at most 2 MiB together"),
    "flood": (_flood, Outcome.SIZE, "at most 2 MiB together"),
}
AGAIN: dict[str, tuple[bytes | Callable[..., object], Outcome, str]] = {
    "busy": (answer(SECRET, status="503 Busy"), Outcome.STATUS, "answers 503"),
    "early": (answer(SECRET, status="425 Too Early"), Outcome.STATUS, "answers 425"),
    "many requests": (answer(SECRET, status="429 Wait"), Outcome.STATUS, "answers 429"),
    "timeout": (answer(SECRET, status="408 Timeout"), Outcome.STATUS, "answers 408"),
    "slow": (_drip, Outcome.TIME, "longer than"),
    "truncated": (answer(SECRET, length=1000), Outcome.PROTOCOL, "not to the end"),
    "no http": (SECRET + b"\r\n\r\n", Outcome.PROTOCOL, "does not answer as HTTP"),
    "large head": (
        answer(b"", f"X: {'a' * 4 * MAX_HEAD_BYTES}"),
        Outcome.PROTOCOL,
        "answer as HTTP",
    ),
    "many chunks": (chunked(*[b"a"] * 9000), Outcome.PROTOCOL, "too many small parts"),
    "many heads": (b"HTTP/1.1 100 Continue\r\n\r\n" * 9000, Outcome.PROTOCOL, "too many small"),
    "nothing": (b"", Outcome.PROTOCOL, "not to the end"),
}


@pytest.mark.parametrize("name", [*FINAL, *AGAIN])
def test_bad_answers_are_refused_without_their_content(
    fetching: Fetching,
    host: ImageHost,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(fetcher, "FETCH_SECONDS", 0.5 if name == "slow" else 30.0)
    monkeypatch.setattr(fetcher, "MAX_FETCHED_BYTES", 2 * MIB)
    host.files["/bad"], outcome, reason = (FINAL | AGAIN)[name]  # type: ignore[assignment]
    kind = InvalidArgument if name in FINAL else ImageFetchFailed
    with pytest.raises(kind, match=reason) as refused:
        fetching.run(host.url("/bad?key=private"))
    message = refused.value.message
    assert message.startswith(f"image 0: no image from '{host.address}': ")
    assert not {"secret", "private", "169.254"} & set(message.replace("/", " ").split())
    assert SECRET.decode() not in message
    assert refused.value.subject == "image 0"
    assert fetching.charged_s >= fetcher.FETCH_WORK_SECONDS
    assert fetching.outcomes == [outcome]
    assert "private" not in caplog.text


def test_images_of_a_call_share_its_bound(
    fetching: Fetching, host: ImageHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher, "MAX_FETCHED_BYTES", 100_000)
    assert fetching.run(host.url("/a.png")) == [IMAGE]
    with pytest.raises(InvalidArgument, match="have at most"):
        fetching.run(host.url("/a.png"), host.url("/a.png"))


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of time in their proportion, and shorter."""
    monkeypatch.setattr(fetcher, "FETCH_SECONDS", fetcher.FETCH_SECONDS / 5)
    monkeypatch.setattr(fetcher, "PLACE_SECONDS", fetcher.PLACE_SECONDS / 5)


@pytest.mark.usefixtures("soon")
def test_files_wait_for_the_memory_of_requests(fetching: Fetching, host: ImageHost) -> None:
    """As long as for a place, in addition to the time of the fetch."""
    others = fetching.memory.reserve("other", 64 * MIB - 1000)
    with others, pytest.raises(ShareExceeded, match=r"request_bytes.*--request-memory") as refused:
        fetching.run(host.url("/a.png"))
    assert refused.value.retry_after_s
    assert fetching.outcomes == [Outcome.NO_ROOM]


def test_a_fetch_goes_on_when_there_is_memory(
    fetching: Fetching, host: ImageHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own time stands still meanwhile, and goes on then: see "slow" above."""
    monkeypatch.setattr(fetcher, "FETCH_SECONDS", 2.0)
    others = fetching.memory.reserve("other", 64 * MIB - 1000)

    async def body() -> list[bytes]:
        reading = asyncio.create_task(fetching.fetch_alone(host.url("/a.png")))
        while not fetching.memory.use().num_waiting:
            await asyncio.sleep(0.001)
        await asyncio.sleep(fetcher.FETCH_SECONDS)
        others.release()
        return await reading

    assert asyncio.run(body()) == [IMAGE]


def test_files_above_the_share_are_refused_at_once(authority: Authority, host: ImageHost) -> None:
    memory = Shares("request_bytes", 2 * len(IMAGE), 0.5)
    fetching = Fetching(authority.path, host.address, memory=memory)
    assert fetching.run(host.url("/a.png")) == [IMAGE]
    body = fetching.memory.reserve("account", 1)
    host.files["/b.png"] = answer(IMAGE + b"a")
    for urls in ([host.url("/b.png")], [host.url("/a.png")] * 2):
        with pytest.raises(ShareExceeded, match="send fewer or smaller images") as refused:
            asyncio.run(fetching.fetch_alone(*urls))
        assert not refused.value.retry_after_s
    body.release()


def test_calls_that_have_files_do_not_wait_for_each_other(
    authority: Authority, host: ImageHost
) -> None:
    """Each keeps its first file: its next one fails at once if there is no room for it."""
    memory = Shares("request_bytes", 3 * len(IMAGE))
    fetching = Fetching(authority.path, host.address, memory=memory)

    async def second(writer: asyncio.StreamWriter) -> None:
        while fetching.outcomes.count(Outcome.DONE) < 2:
            await asyncio.sleep(0.001)
        writer.write(answer(IMAGE + IMAGE))
        await writer.drain()

    host.files["/second"] = second
    urls = host.url("/a.png"), host.url("/second")

    async def body() -> list[list[bytes] | BaseException]:
        calls = [fetching.fetch_alone(*urls) for _ in range(2)]
        async with asyncio.timeout(fetcher.PLACE_SECONDS / 2):
            return await asyncio.gather(*calls, return_exceptions=True)

    found = asyncio.run(body())
    # One may find room, once the other has let go of its file.
    refused = [each for each in found if isinstance(each, ShareExceeded)]
    assert refused
    assert all(each.retry_after_s for each in refused)
    assert all(each in refused or each == [IMAGE, IMAGE + IMAGE] for each in found)
    assert fetching.memory.used == 0
    assert fetching.outcomes.count(Outcome.NO_ROOM) == len(refused)


@pytest.mark.parametrize(
    "sizes", [[10 << 10] * 17, [MIB // 2, int(15.2 * MIB)], [16 * MIB]], ids=["many", "two", "one"]
)
def test_files_of_unknown_length_count_as_their_bytes(
    fetching: Fetching, host: ImageHost, sizes: list[int]
) -> None:
    for index, size in enumerate(sizes):
        data = bytes(size)
        pieces = [data[start : start + (1 << 16)] for start in range(0, size, 1 << 16)]
        host.files[f"/{index}"] = chunked(*pieces)
    found = fetching.run(*[host.url(f"/{index}") for index in range(len(sizes))])
    assert [len(each) for each in found] == sizes


def test_fetches_of_an_account_are_bounded(
    fetching: Fetching, host: ImageHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four places an account has two: its third fetch waits until they are free."""
    running = most = 0

    async def count(writer: asyncio.StreamWriter) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        writer.write(answer(b"a"))
        await writer.drain()

    host.files["/count"] = count
    assert fetching.run(*[host.url("/count")] * 6) == [b"a"] * 6
    assert most == 2


def test_a_failure_ends_the_other_fetches_of_a_call(fetching: Fetching, host: ImageHost) -> None:
    host.files["/drip"] = _drip
    with pytest.raises(InvalidArgument, match=r"image 1: .* answers 404"):
        fetching.run(host.url("/drip"), host.url("/none"))
    assert fetching.outcomes == [Outcome.STATUS]


# --- certificates ---


def test_a_certificate_of_another_authority_is_refused(
    host: ImageHost, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fetching = Fetching(Authority(tmp_path).path, host.address)
    host.requests.clear()
    with pytest.raises(ImageFetchFailed, match="its certificate is not valid for it"):
        fetching.run(host.url("/a.png"))
    assert fetching.outcomes == [Outcome.CERTIFICATE]
    assert not host.requests
    [line] = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert "127.0.0.1" in line.detail  # type: ignore[attr-defined]


def test_a_certificate_is_for_the_name_of_the_url(authority: Authority, host: ImageHost) -> None:
    """Also where the address is known: it is asked for by name."""

    async def body(name: str) -> bytes:
        location = parse_url(f"https://{name}:{host.port}/a.png")
        async with ask(location, ["127.0.0.1"], make_context(authority.path), "agent") as found:
            return b"".join([part async for part in found.body()])

    host.requests.clear()
    host.server_names.clear()
    assert asyncio.run(body(NAME)) == IMAGE
    assert f"\r\nHost: {NAME}:{host.port}\r\n" in host.requests[0]
    assert host.server_names == [NAME]
    with pytest.raises(exchange.FetchFailure, match="certificate is not valid"):
        asyncio.run(body("other.test"))


def test_a_file_of_authorities_is_checked_at_start(tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    with pytest.raises(OSError, match=r"ca\.pem"):
        make_context(path)
    path.write_text("none")
    with pytest.raises(InvalidSetting, match=r"--image-tls-ca-file: .* has no PEM certificate"):
        make_context(path)


def test_plain_http_needs_an_entry_that_says_so(tmp_path: Path, authority: Authority) -> None:
    with ImageHost() as plain:
        plain.files["/a"] = answer(IMAGE)
        assert Fetching(authority.path, f"http://{plain.address}").run(plain.url("/a")) == [IMAGE]
        with pytest.raises(InvalidArgument, match="fetches nothing"):
            Fetching(authority.path, plain.address).run(plain.url("/a"))


# --- addresses ---


@pytest.mark.parametrize("found", [["127.0.0.1"], ["8.8.8.8", "169.254.169.254"], ["::1"]])
def test_a_name_may_not_have_an_address_of_this_machine(
    authority: Authority, host: ImageHost, found: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    fetching = Fetching(authority.path, f"{NAME}:{host.port}", lookup=lambda *_: found)
    host.requests.clear()
    with pytest.raises(
        ImageFetchFailed, match="an address that the server does not connect to"
    ) as e:
        fetching.run(f"https://{NAME}:{host.port}/a.png")
    assert found[-1] not in e.value.message  # which is for the log
    assert found[-1] in caplog.records[-1].detail  # type: ignore[attr-defined]
    assert fetching.outcomes == [Outcome.ADDRESS]
    assert not host.requests


def test_localhost_is_a_name(authority: Authority, host: ImageHost) -> None:
    """By the machine's own resolver: only its literal address is allowed by an entry."""
    fetching = Fetching(authority.path, f"localhost:{host.port}", lookup=fetcher.look_up)
    with pytest.raises(ImageFetchFailed, match="an address that the server does not connect to"):
        fetching.run(f"https://localhost:{host.port}/a.png")


def test_a_plain_name_may_not_have_a_private_address(authority: Authority) -> None:
    fetching = Fetching(authority.path, f"http://{NAME}", lookup=lambda *_: ["10.0.0.1"])
    with pytest.raises(ImageFetchFailed, match="an address that the server does not connect to"):
        fetching.run(f"http://{NAME}/a.png")


def test_a_name_is_looked_up_once(
    authority: Authority, host: ImageHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second answer, behind the check, would be this machine's: nothing asks for it."""
    answers = iter([["192.0.2.1"], ["127.0.0.1"]])
    connected: list[str] = []

    async def connect(address: str, port: int, **options: object) -> None:
        connected.append(address)
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(asyncio, "open_connection", connect)
    fetching = Fetching(authority.path, f"{NAME}:{host.port}", lookup=lambda *_: next(answers))
    with pytest.raises(ImageFetchFailed, match="cannot be reached"):
        fetching.run(f"https://{NAME}:{host.port}/a.png")
    assert connected == ["192.0.2.1"]
    assert next(answers) == ["127.0.0.1"]


def test_one_name_that_does_not_resolve_leaves_others_their_lookups(authority: Authority) -> None:
    """Its fetches share one lookup, whose thread keeps neither others nor the process waiting."""
    done = threading.Event()
    looked_up: list[str] = []
    threads: list[threading.Thread] = []

    def look_up(host: str, port: int) -> Sequence[str]:
        looked_up.append(host)
        threads.append(threading.current_thread())
        if host == "dead.test":
            done.wait(60.0)
        raise OSError("no such name")

    fetching = Fetching(authority.path, "dead.test", "other.test", lookup=look_up)
    fetching.fetches = fetching.fetcher.fetches = Shares("prompt_image_fetches", 16)

    async def body() -> None:
        dead = [
            asyncio.create_task(fetching.fetch_alone("https://dead.test/a"), name=f"dead {i}")
            for i in range(8)
        ]
        while fetching.fetches.used < 8:
            await asyncio.sleep(0.001)
        for _ in range(2):
            with pytest.raises(ImageFetchFailed, match="its name has no address"):
                await fetching.fetch_alone("https://other.test/a")
        for each in dead[1:]:  # the others go on with the lookup
            each.cancel()
        await asyncio.wait(dead[1:])
        done.set()
        with pytest.raises(ImageFetchFailed, match="its name has no address"):
            await dead[0]

    asyncio.run(body())
    assert sorted(looked_up) == ["dead.test", "other.test", "other.test"]
    assert all(each.daemon for each in threads)


def test_a_lookup_that_nobody_waits_for_ends_alone(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also after its event loop."""
    monkeypatch.setattr(fetcher, "FETCH_SECONDS", 0.05)
    begun: list[threading.Thread] = []
    done = threading.Event()

    def look_up(host: str, port: int) -> Sequence[str]:
        begun.append(threading.current_thread())
        done.wait(60.0)
        raise OSError("no such name")

    fetching = Fetching(authority.path, "dead.test", lookup=look_up)
    with pytest.raises(ImageFetchFailed, match="takes longer than"):
        fetching.run("https://dead.test/a")
    done.set()
    begun[0].join(60.0)
    assert not begun[0].is_alive()
    assert not [each for each in caplog.records if each.name == "asyncio"]


def test_a_name_without_addresses(authority: Authority) -> None:
    fetching = Fetching(authority.path, "images.invalid", lookup=fetcher.look_up)
    with pytest.raises(ImageFetchFailed, match="its name has no address"):
        fetching.run("https://images.invalid/a.png")


def test_nobody_listens(authority: Authority) -> None:
    with ImageHost() as gone:
        address = gone.address
    with pytest.raises(ImageFetchFailed, match="it cannot be reached"):
        Fetching(authority.path, address).run(f"https://{address}/a")
