"""The matrix: every hostile adapter gets its own name of failure, beside a good one that works."""

from __future__ import annotations

import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from adapter_store.config import StoreSettings
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from tests.adapter_store import hostile
from tests.adapter_store.hostile import CONFIG, UPLOAD_NAMES, WEIGHTS
from tests.adapter_store.hostile_experts import EXPERT_CASES
from tests.adapter_store.hostile_texts import TEXT_CASES
from tests.support.store.adapters import save_adapter
from tests.support.store.served import Served
from tests.support.wait import until

pytestmark = [pytest.mark.slow, pytest.mark.processes]

CASES = {**hostile.CASES, **TEXT_CASES, **EXPERT_CASES}
GROUPS = {name.partition(":")[0]: name for name in CASES}
"""What cases are about, and the last case of each."""
CODES = {"LIMIT_EXCEEDED": "RESOURCE_EXHAUSTED"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile")


@pytest.fixture(scope="module")
def client(place):
    """One store for the whole matrix: what a case leaves behind would show in the next."""
    settings = StoreSettings(
        listen="127.0.0.1:0",
        metrics_listen="127.0.0.1:0",
        data_dir=place / "data",
        source_roots=(place,),
    )
    served = Served(settings)
    yield served.client
    served.stop()


@pytest.fixture
def folder(make_adapter, place, request):
    """A good adapter within the store's roots."""
    made = make_adapter(("q_proj",))
    return made.rename(place / f"case{abs(hash(request.node.name))}")


@pytest.fixture(scope="module")
def good(client, place):
    """An adapter that is registered, and what the store answered."""
    folder = place / "good"
    save_adapter(folder, ("q_proj",), seed=1)
    return folder, client.register("good", folder)


@pytest.fixture
def check(client, place, good):
    """check(): nothing is stored or staged; the good adapter registers, its digest and the history
    are as before. check(is_last=False): the store's folders alone. What a case has recorded stays,
    and shows after the last of its group."""
    good, before = good

    def check(*, is_last: bool = True) -> None:
        assert len(list((place / "data" / "blobs").iterdir())) == 1
        until(lambda: not list((place / "data" / "staging").iterdir()), what="something is staged")
        if not is_last:
            return
        after = client.register("good", good)
        assert after.adapter.digest == before.adapter.digest
        assert after.revision == before.revision, "something was recorded"
        listed = client.stub.ListAdapters(pb.ListAdaptersRequest()).adapters
        assert [adapter.name for adapter in listed] == ["default/good"]

    return check


def reason_of(error) -> str:
    info = error_details_pb2.ErrorInfo()
    assert rpc_status.from_call(error).details[0].Unpack(info)
    assert info.metadata["subject"], "names no culprit"
    return info.reason


def test_the_matrix_is_large():
    assert len(CASES) + len(UPLOAD_NAMES) >= 60


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_adapter_is_refused_by_name(client, folder, check, refused, case):
    reason, change = CASES[case]
    change(folder)
    refusal = refused(CODES.get(reason, "INVALID_ARGUMENT"))
    with refusal:
        client.register("evil", folder)
    assert reason_of(refusal.error) == reason
    check(is_last=case in GROUPS.values())


@pytest.mark.parametrize("case", UPLOAD_NAMES)
def test_a_hostile_file_name_is_refused(client, folder, check, refused, case):
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    refusal = refused("INVALID_ARGUMENT", "is not a plain file name")
    with refusal:
        client.upload("evil", {**files, UPLOAD_NAMES[case]: b"x" * 10})
    assert reason_of(refusal.error) == "INVALID_ARGUMENT"
    check()


def test_file_longer_than_its_offset(client, folder, check, refused):
    def requests():
        yield pb.UploadAdapterRequest(meta=pb.UploadMeta(name="evil"))
        for offset in (0, 1 << 60):
            chunk = pb.FileChunk(file_name=WEIGHTS, offset=offset, data=b"x")
            yield pb.UploadAdapterRequest(chunk=chunk)

    with refused("INVALID_ARGUMENT", "chunk.offset", "continues at 1"):
        client.stub.UploadAdapter(requests())
    check()


def test_more_files_than_an_adapter_has(client, folder, check, refused):
    files = {f"file-{number}": b"x" for number in range(300)}
    with refused("RESOURCE_EXHAUSTED", "one file more than 256"):
        client.upload("evil", {CONFIG: b"{}", **files})
    check()
