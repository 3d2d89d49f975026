from __future__ import annotations

import pytest

from adapter_store.access import Action
from adapter_store.errors import RevisionTooOld
from adapter_store.gate import Gate
from adapter_store.policy import PolicyFile
from servicekit.errors import PermissionDenied, Unauthenticated
from tests.adapter_store.service.guarded import token_lines, token_of, write_policy


def carrying(token: str) -> list[tuple[str, str | bytes]]:
    return [("user-agent", "test"), ("authorization", f"Bearer {token}")]


@pytest.fixture
def policies(tmp_path) -> PolicyFile:
    return PolicyFile(write_policy(tmp_path, token_lines("r", ["reader"])))


@pytest.fixture
def gate(policies) -> Gate:
    return Gate(policies)


def test_who_and_what(gate):
    assert gate.admit(carrying(token_of("r")), Action.READ).name == "r"
    with pytest.raises(PermissionDenied):
        gate.admit(carrying(token_of("r")), Action.PUBLISH)


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        [("user-agent", "test")],
        [("authorization", token_of("r"))],
        [("authorization", "")],
        [("authorization", f"Basic {token_of('r')}")],
        [("authorization-bin", f"Bearer {token_of('r')}".encode())],
        [("authorization", f"Bearer {token_of('r')}".encode())],
        [("authorization", "Bearer x"), ("authorization", f"Bearer {token_of('r')}")],
    ],
)
def test_anything_else_is_no_token(gate, metadata):
    with pytest.raises(Unauthenticated):
        gate.identify(metadata)


def test_a_stay_notices_what_changed_for_it(gate, policies, tmp_path):
    stay = gate.stay(carrying(token_of("r")), Action.READ)

    def change(*lines: str) -> None:
        write_policy(tmp_path, *lines)
        policies.reload()

    stay.renew()
    change(token_lines("r", ["reader", "publisher"]), token_lines("other", ["admin"]))
    stay.renew()
    change(token_lines("r", ["publisher"]))  # reads, too
    stay.renew()
    change(token_lines("r", ["reader"], ["team-a", "team-b"]))
    with pytest.raises(RevisionTooOld, match="list again"):
        stay.renew()
    change(token_lines("r", ["caller"]))
    with pytest.raises(PermissionDenied):
        stay.renew()
    change("")
    with pytest.raises(Unauthenticated):
        stay.renew()
