"""A served store in this process, with real channels to it."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
import torch

from inference_svc.adapters.pulls.registration import Registrations
from tests.adapter_store.service.receivers import Receiver
from tests.support.store.catalogs import make_data_folder
from tests.support.store.client import Client
from tests.support.store.process import Process
from tests.support.store.served import Served, serving


@pytest.fixture
def serve(tmp_path, data_dir):
    """serve(**settings): a served store over tmp_path/data that may read what tmp_path holds."""
    with serving(tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def serve_shared(shared_folder):
    """Does as `serve`, over shared_folder, for all tests of a module."""
    make_data_folder(shared_folder / "data")
    with serving(shared_folder) as start:
        yield start


@pytest.fixture
def spawn(tmp_path):
    """spawn("--flag", "value", ..., NAME="value"): a store as a process, with that environment; on
    a `volume` if one is given."""
    made: list[Process] = []

    def start(*arguments: str, volume=None, **environment: str) -> Process:
        made.append(Process(tmp_path, *arguments, volume=volume, **environment))
        return made[-1]

    yield start
    for process in made:
        process.process.kill()
        process.process.wait()


@pytest.fixture
def own_threads():
    """A store that starts takes torch's threads away from this process."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def store(serve) -> Served:
    return serve()


@pytest.fixture
def client(store) -> Client:
    return store.client


@pytest.fixture
def connect():
    """connect(address, token, credentials): a Client that is closed in the end."""
    with ExitStack() as stack:

        def make(address: str, token: str = "", credentials=None) -> Client:
            client = Client(address, token, credentials)
            stack.callback(client.close)
            return client

        yield make


@pytest.fixture
def refused():
    """with refused(code, "text", ...) as error: the call is answered so, and names each text."""

    class Refused:
        def __init__(self, code: str, *texts: str) -> None:
            self.code, self.texts = code, texts

        def __enter__(self) -> Refused:
            return self

        def __exit__(self, kind, error, traceback) -> bool:
            assert isinstance(error, grpc.RpcError), f"not refused: {error!r}"
            self.error = error
            assert error.code().name == self.code, error.details()
            for text in self.texts:
                assert text in error.details()
            return True

    return Refused


@pytest.fixture
def receive():
    with ExitStack() as stack:

        def make(
            address: str, path: Path | None, registrations: Registrations | None = None
        ) -> Receiver:
            receiver = Receiver(address, path, registrations)
            stack.callback(receiver.close)
            return receiver

        yield make


@pytest.fixture
def path(tmp_path):
    """Short enough for a socket."""
    folder = Path(f"/tmp/loadout-{os.getpid()}-{tmp_path.name[-20:]}")
    folder.mkdir()
    yield folder / "share.sock"
    shutil.rmtree(folder)
