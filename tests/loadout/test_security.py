"""Tokens and TLS over real channels: shown where they should be, and nowhere else."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import grpc
import pytest

from loadout import AsyncClient, Client, TlsConfig, errors
from loadout.adapter_store.v1 import adapter_store_pb2 as store_pb
from loadout.adapter_store.v1 import adapter_store_pb2_grpc as store_grpc
from loadout.cli.__main__ import main
from loadout.retry import RetryPolicy
from loadout.security import is_loopback
from tests.support.access.certificates import Authority
from tests.support.loadout.scripted import Server

TOKEN = "s3cret-token"
ONCE = RetryPolicy(max_attempts=1)
GET = store_pb.GetAdapterResponse(adapter=store_pb.Adapter(name="default/a", version=1))


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def shown(fake_store, fake_inference, chunks):
    """The authorization that every call carried, of services that answer all."""
    seen = []

    def answering(answer):
        def behave(request, context):
            seen.append(dict(context.invocation_metadata()).get("authorization"))
            return answer

        return behave

    fake_store.on("GetAdapter", answering(GET))
    fake_store.on("UploadAdapter", answering(store_pb.UploadAdapterResponse()))
    fake_store.on("WatchAdapters", answering(iter([])))
    fake_inference.on("Generate", answering(iter(chunks)))
    return seen


@pytest.fixture
def start_tls(fake_store, authority):
    servers = []

    def start(*, client_ca=False) -> str:
        chain, key = authority.issue("service")
        credentials = grpc.ssl_server_credentials(
            [(key.read_bytes(), chain.read_bytes())],
            root_certificates=authority.pem if client_ca else None,
            require_client_auth=client_ca,
        )
        servers.append(
            Server(
                lambda s: store_grpc.add_AdapterStoreServiceServicer_to_server(fake_store, s),
                credentials=credentials,
            )
        )
        return servers[-1].address

    yield start
    for server in servers:
        server.kill()


def test_every_call_shows_the_token(store_server, inference_server, shown, adapter_folder):
    with Client(inference_server.address, store_server.address, token=TOKEN) as client:
        client.get("a")
        client.register("a", adapter_folder)
        list(client.watch())
        client.complete("hi")
    assert shown == [f"Bearer {TOKEN}"] * 4


def test_every_call_of_the_asyncio_client_shows_it(
    store_server, inference_server, shown, adapter_folder
):
    async def body():
        addresses = (inference_server.address, store_server.address)
        async with AsyncClient(*addresses, token=TOKEN) as client:
            await client.get("a")
            await client.register("a", adapter_folder)
            [_ async for _ in client.watch()]
            await client.complete("hi")

    asyncio.run(body())
    assert shown == [f"Bearer {TOKEN}"] * 4


def test_without_a_token_none_is_shown(store_server, shown):
    with Client(store=store_server.address) as client:
        client.get("a")
    assert shown == [None]


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("argument", ["store", "inference"])
def test_a_token_does_not_leave_the_machine_in_the_clear(kind, argument):
    address = "loadout.example:7070"
    with pytest.raises(errors.InvalidArgument, match="without TLS") as caught:
        kind(**{argument: address}, token=TOKEN)
    assert caught.value.subject == argument
    assert TOKEN not in str(caught.value)


def test_unless_somebody_says_so():
    Client(store="loadout.example:7070", token=TOKEN, allow_insecure_token=True).close()
    Client(store="loadout.example:7070", token=TOKEN, tls=True).close()
    Client(store="loadout.example:7070").close()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:7070", True),
        ("127.8.8.8:7070", True),
        ("[::1]:7070", True),
        ("localhost:7070", True),
        ("localhost", True),
        ("dns:///localhost:7070", True),
        ("ipv4:127.0.0.1:7070,127.0.0.2:7070", True),
        ("ipv6:[::1]:7070", True),
        ("unix:/run/loadout.sock", True),
        ("10.0.0.1:7070", False),
        ("0.0.0.0:7070", False),
        ("localhost.example:7070", False),
        ("127.0.0.1.example:7070", False),
        ("dns:///loadout.example:7070", False),
        ("dns://10.0.0.1/localhost:7070", False),
        ("ipv4:127.0.0.1:7070,10.0.0.1:7070", False),
        ("[2001:db8::1]:7070", False),
    ],
)
def test_what_counts_as_this_machine(address, expected):
    assert is_loopback(address) is expected


@pytest.mark.parametrize("token", ["", "two words", "line\nbreak", "ünïcode", "nul\0"])
def test_a_token_that_no_header_can_carry_is_refused_unquoted(token):
    with pytest.raises(errors.InvalidArgument, match="visible ASCII") as caught:
        Client(store="127.0.0.1:1", token=token)
    assert caught.value.subject == "token"
    assert not token or token not in str(caught.value)


def test_nothing_that_shows_an_object_shows_the_token(store_server, shown, fail, fake_store):
    with Client(store=store_server.address, token=TOKEN, retry=ONCE) as client:
        stream = client.watch()
        described = [repr(each) for each in (client, vars(client), stream, vars(stream))]
        described.append(repr(vars(client._channels)))
        fake_store.on("GetAdapter", fail(grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED"))
        with pytest.raises(errors.Unauthenticated) as caught:
            client.get("a")
        described += [repr(caught.value), str(caught.value), repr(vars(caught.value))]
    assert not [each for each in described if TOKEN in each]


@pytest.mark.processes
def test_a_proxy_of_the_environment_never_sees_a_token_in_the_clear(store_server, shown):
    """gRPC sends even calls to loopback through http_proxy."""
    program = f"""
from loadout import Client
with Client(store={store_server.address!r}, token={TOKEN!r}, timeout_s=20) as client:
    client.get("a")
"""
    environment = {**os.environ, "http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)
    assert shown == [f"Bearer {TOKEN}"]


# --- the commands ------------------------------------------------------------------------------


@pytest.fixture
def run(capfd):
    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run


def test_a_command_takes_its_token_from_the_environment_or_a_file(
    run, monkeypatch, inference_server, shown, tmp_path
):
    monkeypatch.setenv("LOADOUT_INFERENCE", inference_server.address)
    assert run("generate", "hi")[0] == 0
    monkeypatch.setenv("LOADOUT_TOKEN", f"{TOKEN}-of-environment\n")
    assert run("generate", "hi")[0] == 0
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}-of-file\n")
    assert run("generate", "--token-file", str(file), "hi")[0] == 0
    assert shown == [None, f"Bearer {TOKEN}-of-environment", f"Bearer {TOKEN}-of-file"]


def test_a_command_over_mutual_tls(run, start_tls, authority, shown, tmp_path, adapter_folder):
    cert, key = authority.issue("trainer")
    flags = [
        "--tls-ca-file",
        str(authority.path),
        "--tls-cert-file",
        str(cert),
        "--tls-key-file",
        str(key),
    ]
    address = start_tls(client_ca=True)
    code, _, err = run("register", "a", str(adapter_folder), "--store", address, *flags)
    assert (code, err, shown) == (0, "", [None])


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (b"\xff\xfe", "not ASCII"), (None, "No such file or directory")],
)
def test_an_unusable_token_file_is_one_line(run, tmp_path, content, message):
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    code, out, err = run("adapters", "--token-file", str(file))
    assert (code, out) == (1, "")
    assert err.startswith(f"loadout: --token-file: {file}")
    assert err.endswith(f"{message}\n")


def test_a_command_does_not_send_the_token_in_the_clear(run, monkeypatch):
    monkeypatch.setenv("LOADOUT_TOKEN", TOKEN)
    code, out, err = run("adapters", "--store", "loadout.example:7070")
    assert (code, out) == (1, "")
    assert err == (
        "loadout: store: the token would go to loadout.example:7070 without TLS: use TLS, or "
        "allow_insecure_token\n"
    )


# --- TLS ----------------------------------------------------------------------------------------


def test_tls(start_tls, authority, shown):
    address = start_tls()
    with Client(store=address, token=TOKEN, tls=TlsConfig(authority.path)) as client:
        assert client.get("a").name == "default/a"
    assert shown == [f"Bearer {TOKEN}"]


def test_tls_of_the_asyncio_client(start_tls, authority, shown):
    async def body():
        config = TlsConfig(str(authority.path))
        async with AsyncClient(store=start_tls(), token=TOKEN, tls=config) as client:
            return await client.get("a")

    assert asyncio.run(body()).name == "default/a"
    assert shown == [f"Bearer {TOKEN}"]


def test_a_service_of_another_authority_is_not_talked_to(start_tls, shown, tmp_path):
    stranger = Authority(tmp_path, "stranger")
    for tls in (TlsConfig(stranger.path), True):
        client = Client(store=start_tls(), token=TOKEN, tls=tls, retry=ONCE)
        with client, pytest.raises(errors.StreamLost):
            client.get("a")
    assert not shown


def test_mutual_tls(start_tls, authority, shown):
    address = start_tls(client_ca=True)
    own = TlsConfig(authority.path, *authority.issue("trainer"))
    with Client(store=address, tls=own) as client:
        assert client.get("a").name == "default/a"
    nobody = Client(store=address, tls=TlsConfig(authority.path), retry=ONCE)
    with nobody, pytest.raises(errors.StreamLost):
        nobody.get("a")
    assert shown == [None]


@pytest.mark.parametrize(
    ("build", "subject"),
    [
        (lambda a, junk: TlsConfig(junk.with_name("nowhere")), "tls.ca_file"),
        (lambda a, junk: TlsConfig(junk), "tls.ca_file"),
        (lambda a, junk: TlsConfig(a.path, a.issue("x")[0]), "tls.key_file"),
        (lambda a, junk: TlsConfig(a.path, None, a.issue("x")[1]), "tls.cert_file"),
        (lambda a, junk: TlsConfig(a.path, a.issue("x")[0], junk), "tls.cert_file"),
        (lambda a, junk: TlsConfig(a.path, a.issue("x")[0], a.issue("y")[1]), "tls.cert_file"),
    ],
    ids=["no file", "no certificate", "no key", "no chain", "junk key", "another's key"],
)
def test_unusable_files_are_said_at_once(authority, tmp_path, build, subject):
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")
    with pytest.raises(errors.InvalidArgument) as caught:
        Client(store="127.0.0.1:1", tls=build(authority, junk))
    assert caught.value.subject == subject
