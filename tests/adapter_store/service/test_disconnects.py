"""A caller that goes away leaves nothing behind, at whatever moment it goes."""

from __future__ import annotations

import threading

import pytest

from adapter_store.registration.registrar import Registrar
from loadout.adapter_store.v1 import adapter_store_pb2 as pb
from tests.support.wait import TIMEOUT_S, until

pytestmark = pytest.mark.slow


def test_gone_while_the_folder_of_its_upload_is_made(client, tmp_path, monkeypatch) -> None:
    made, go_on = threading.Event(), threading.Event()
    open_upload = Registrar.open_upload

    def slowly(registrar, request):
        upload = open_upload(registrar, request)
        made.set()
        assert go_on.wait(TIMEOUT_S)
        return upload

    monkeypatch.setattr(Registrar, "open_upload", slowly)
    never = threading.Event()

    def requests():
        yield pb.UploadAdapterRequest(meta=pb.UploadMeta(name="gone"))
        never.wait(TIMEOUT_S)

    call = client.stub.UploadAdapter.future(requests())
    assert made.wait(TIMEOUT_S)
    call.cancel()
    client.stub.GetStoreStatus(pb.GetStoreStatusRequest())  # what the store hears after the cancel
    go_on.set()
    never.set()
    until(lambda: not list((tmp_path / "data" / "staging").iterdir()))


def test_an_upload_that_sends_nothing_more_is_ended(serve, tmp_path, refused) -> None:
    client = serve(transfer_stall_seconds=0.1).client
    over = threading.Event()

    def requests():
        yield pb.UploadAdapterRequest(meta=pb.UploadMeta(name="a"))
        over.wait(TIMEOUT_S)

    try:
        with refused("DEADLINE_EXCEEDED", "sent nothing"):
            client.stub.UploadAdapter(requests())
    finally:
        over.set()
    until(lambda: not list((tmp_path / "data" / "staging").iterdir()))
