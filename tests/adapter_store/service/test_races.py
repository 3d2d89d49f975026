"""Trainers that race for one name: exactly one wins, and the losers leave nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from adapter_store.catalog.names import Names
from adapter_store.registration.registrar import Registrar
from loadout.adapter_store.v1 import adapter_store_pb2 as pb

pytestmark = pytest.mark.slow

ROUNDS = 4
DEADLINE_S = 60.0


@pytest.fixture
def all_checked(monkeypatch):
    """all_checked(n): the next n registrations and rollbacks are checked before the first of them
    goes on, so that only the catalog can tell them apart."""
    barriers: list[threading.Barrier] = []
    check, rollback = Registrar.check, Names.rollback

    def checked(registrar, asked) -> None:
        check(registrar, asked)
        if barriers and asked.if_current_digest:
            barriers[-1].wait(DEADLINE_S)

    def rolled_back(names, *args):
        if barriers:
            barriers[-1].wait(DEADLINE_S)
        return rollback(names, *args)

    monkeypatch.setattr(Registrar, "check", checked)
    monkeypatch.setattr(Names, "rollback", rolled_back)
    return lambda number: barriers.append(threading.Barrier(number))


def outcomes(calls: list[Callable[[], object]]) -> list[object]:
    """Runs all at the same time; gives answers and status codes."""

    def run(call: Callable[[], object]) -> object:
        try:
            return call()
        except grpc.RpcError as error:
            return error.code().name

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def blobs_on_disk(tmp_path) -> set[str]:
    return {f"sha256:{folder.name}" for folder in (tmp_path / "data" / "blobs").iterdir()}


def files_of(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_one_of_all_that_expect_the_same_current_wins(
    store, client, make_adapter, tmp_path, all_checked
) -> None:
    """Registrations, an upload and a rollback."""
    client.register("raced", make_adapter(folder="first", seed=1000))
    kept = blobs_on_disk(tmp_path)
    for turn in range(ROUNDS):
        current = client.register("raced", make_adapter(folder=f"{turn}", seed=turn)).adapter
        kept.add(current.digest)
        folders = [make_adapter(folder=f"{turn}-{i}", seed=10 * turn + i + 100) for i in range(3)]
        fields = {"if_current_digest": current.digest}
        back = pb.RollbackAdapterRequest(name="raced", version=1, **fields)
        all_checked(4)
        answers = outcomes(
            [
                lambda f=folders[0], w=fields: client.register("raced", f, **w),
                lambda f=folders[1], w=fields: client.register("raced", f, **w),
                lambda f=folders[2], w=fields: client.upload("raced", files_of(f), **w),
                lambda request=back: client.stub.RollbackAdapter(request),
            ]
        )
        (winner,) = [answer for answer in answers if not isinstance(answer, str)]
        assert sorted(answer for answer in answers if answer is not winner) == ["ABORTED"] * 3
        assert client.get("raced").digest == winner.adapter.digest
        kept.add(winner.adapter.digest)
        assert blobs_on_disk(tmp_path) == kept
    assert not list((tmp_path / "data" / "staging").iterdir())
    assert not list((tmp_path / "data" / "trash").iterdir())


def test_refused_registration_leaves_shared_blobs(
    client, make_adapter, tmp_path, all_checked
) -> None:
    """The content is another name's, too: that name's blob stays."""
    shared, new = make_adapter(folder="shared"), make_adapter(folder="new", seed=1)
    other = client.register("other", shared).adapter
    current = client.register("raced", make_adapter(folder="old", seed=2)).adapter
    fields = {"if_current_digest": current.digest}
    all_checked(2)
    outcomes([lambda f=f: client.register("raced", f, **fields) for f in (shared, new)])
    raced = client.get("raced").digest
    assert blobs_on_disk(tmp_path) == {other.digest, current.digest, raced}
    assert client.get("other") == other


@pytest.mark.parametrize("how", ["register", "upload"])
def test_other_content_than_expected_leaves_nothing(
    client, make_adapter, tmp_path, refused, how
) -> None:
    folder = make_adapter()
    expected = "sha256:" + "0" * 64
    with refused("FAILED_PRECONDITION", "expected_digest"):
        if how == "register":
            client.register("raced", folder, expected_digest=expected)
        else:
            client.upload("raced", files_of(folder), expected_digest=expected)
    with refused("NOT_FOUND"):
        client.get("raced")
    assert blobs_on_disk(tmp_path) == set()
    assert not list((tmp_path / "data" / "staging").iterdir())


def test_late_rollback_changes_nothing(client, make_adapter, refused) -> None:
    first = client.register("raced", make_adapter(folder="1")).adapter
    second = client.register("raced", make_adapter(folder="2", seed=1)).adapter
    request = pb.RollbackAdapterRequest(name="raced", version=1, if_current_digest=first.digest)
    with refused("ABORTED", second.digest):
        client.stub.RollbackAdapter(request)
    assert client.get("raced") == second
