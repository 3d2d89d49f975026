"""The Node.js example streams from a real server, wherever node and npm are present."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import grpc
import pytest

from loadout._routing.metadata import ADAPTER_HEADER, adapter_key
from loadout.inference.v1 import inference_pb2_grpc as inference_grpc
from tests.support.access.certificates import Authority
from tests.support.loadout.scripted import Server

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "node"
CACHE = ROOT / ".tools" / "node"


@pytest.fixture(scope="module")
def node_modules() -> Path:
    """The example's dependencies as its lock file pins them, installed once into .tools/node."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not here")
    modules, lock = CACHE / "node_modules", EXAMPLE / "package-lock.json"
    installed = CACHE / "package-lock.json"
    if modules.is_dir() and installed.is_file() and installed.read_bytes() == lock.read_bytes():
        return modules
    CACHE.mkdir(parents=True, exist_ok=True)
    shutil.copy(EXAMPLE / "package.json", CACHE)
    shutil.copy(lock, CACHE)
    install = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    done = subprocess.run(install, cwd=CACHE, capture_output=True, text=True, timeout=200)
    if done.returncode != 0:
        installed.unlink()
        pytest.skip(f"npm cannot install the example's dependencies: {done.stderr.strip()[-300:]}")
    return modules


@pytest.fixture
def run_example(node_modules):
    def run(*arguments: str, token: str = "") -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "NODE_PATH": str(node_modules), "LOADOUT_TOKEN": token}
        command = ["node", str(EXAMPLE / "index.js"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)

    return run


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["--adapter", "upper@2"], "default/upper"),
        (["--adapter", "upper", "--tenant", "acme"], "acme/upper"),
        (["--adapter", "team-a/upper"], "team-a/upper"),
        (["--adapter", f"sha256:{0:064}"], f"sha256:{0:064}"),
        ([], None),
    ],
)
def test_names_the_adapter_to_proxies(
    run_example, inference_server, fake_inference, chunks, arguments, key
):
    """The example sends the keys that our own clients send."""
    keys = []

    def generate(request, context):
        keys.append(dict(context.invocation_metadata()).get(ADAPTER_HEADER))
        return iter(chunks)

    fake_inference.on("Generate", generate)
    assert run_example("--inference", inference_server.address, *arguments, "x").returncode == 0
    reference = arguments[1] if arguments else ""
    tenant = arguments[3] if len(arguments) > 2 else "default"
    assert keys == [key] == [adapter_key(reference, tenant) or None]


def test_streams_a_generation(run_example, inference_server, fake_inference, chunks):
    fake_inference.on("Generate", lambda request, context: iter(chunks))
    done = run_example("--inference", inference_server.address, "--adapter", "upper", "hello=")
    assert (done.returncode, done.stdout) == (0, "hey\n")
    assert done.stderr == "FINISH_REASON_STOP: 2 + 3 tokens\n"
    [request] = fake_inference.requests["Generate"]
    assert (request.text, request.adapter, request.sampling.max_tokens) == ("hello=", "upper", 64)
    assert request.sampling.HasField("temperature")


def test_refusal_is_one_plain_line(run_example, inference_server, fake_inference, fail):
    missing = fail(grpc.StatusCode.NOT_FOUND, "ADAPTER_NOT_FOUND", message="no adapter default/x")
    fake_inference.on("Generate", missing)
    done = run_example("--inference", inference_server.address, "--adapter", "x", "hello=")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "no adapter default/x\n")


def test_lost_stream_says_so(run_example):
    done = run_example("--inference", "127.0.0.1:1", "hello=")
    assert done.returncode == 1
    assert done.stderr.endswith("(stream lost: try again)\n")
    assert len(done.stderr.splitlines()) == 1


def test_shows_its_token_to_this_machine_only(
    run_example, inference_server, fake_inference, chunks, tmp_path
):
    shown = []

    def answer(request, context):
        shown.append(dict(context.invocation_metadata()).get("authorization"))
        return iter(chunks)

    fake_inference.on("Generate", answer)
    file = tmp_path / "token"
    file.write_text("of-file\n")
    assert run_example("--inference", inference_server.address, "hi").returncode == 0
    address = ("--inference", inference_server.address)
    assert run_example(*address, "hi", token="of-environment").returncode == 0
    assert run_example(*address, "--token-file", str(file), "hi").returncode == 0
    assert shown == [None, "Bearer of-environment", "Bearer of-file"]
    done = run_example("--inference", "loadout.example:7080", "hi", token="secret")
    message = "loadout.example:7080 would be sent the token without TLS: pass --tls-ca-file\n"
    assert (done.returncode, done.stderr) == (1, message)


def test_mutual_tls(run_example, fake_inference, chunks, tmp_path):
    fake_inference.on("Generate", lambda request, context: iter(chunks))
    authority = Authority(tmp_path)
    chain, key = authority.issue("service")
    credentials = grpc.ssl_server_credentials(
        [(key.read_bytes(), chain.read_bytes())], authority.pem, require_client_auth=True
    )
    add = inference_grpc.add_InferenceServiceServicer_to_server
    server = Server(lambda s: add(fake_inference, s), credentials=credentials)
    flags = ["--inference", server.address, "--tls-ca-file", str(authority.path)]
    cert, own_key = authority.issue("backend")
    done = run_example(*flags, "--tls-cert-file", str(cert), "--tls-key-file", str(own_key), "hi")
    server.kill()
    assert (done.returncode, done.stdout) == (0, "hey\n"), done.stderr
