"""Whose call it is, and whether it is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from adapter_store.core import Action
from servicekit.auth.authenticator import Authenticator
from servicekit.auth.policy import PolicyFile
from servicekit.errors import PermissionDenied, Unauthenticated
from tests.support.access.policies import token_lines, token_of, write_policy
from tests.support.access.services import STORE


def carrying(value: str) -> list[tuple[str, str | bytes]]:
    return [("user-agent", "test"), ("authorization", value)]


@pytest.fixture
def policies(tmp_path: Path) -> PolicyFile[Any]:
    path = write_policy(tmp_path, token_lines("r", ["reader"]))
    return PolicyFile(path, STORE.parse, STORE.unguarded)


@pytest.fixture
def authenticator(policies: PolicyFile[Any]) -> Authenticator[Action]:
    return Authenticator(policies)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_caller_is_named_and_confined(authenticator, scheme: str) -> None:
    metadata = carrying(f"{scheme} {token_of('r')}")
    assert authenticator.authorize(metadata, Action.READ).name == "r"
    with pytest.raises(PermissionDenied):
        authenticator.authorize(metadata, Action.PUBLISH)


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        [("user-agent", "test")],
        [("authorization", token_of("r"))],
        [("authorization", "")],
        [("authorization", "Bearer")],
        [("authorization", f"Bearer  {token_of('r')}")],
        [("authorization", f"Basic {token_of('r')}")],
        [("authorization-bin", f"Bearer {token_of('r')}".encode())],
        [("authorization", f"Bearer {token_of('r')}".encode())],
        [("authorization", "Bearer x"), ("authorization", f"Bearer {token_of('r')}")],
    ],
    ids=str,
)
def test_anything_else_is_no_token(authenticator, metadata: Any) -> None:
    with pytest.raises(Unauthenticated):
        authenticator.authenticate(metadata)


def test_a_long_lived_call_follows_the_policy(authenticator, policies, tmp_path: Path) -> None:
    call = authenticator.long_lived(carrying(f"Bearer {token_of('r')}"), Action.READ)

    def change(*lines: str) -> None:
        write_policy(tmp_path, *lines)
        policies.reload()

    assert call.revalidate()
    change(token_lines("r", ["reader", "publisher"]), token_lines("other", ["admin"]))
    assert call.revalidate()
    change(token_lines("r", ["publisher"]))  # which reads, too
    assert call.revalidate()
    change(token_lines("r", ["reader"], ["team-a", "team-b"]))
    assert not call.revalidate()
    assert not call.revalidate()
    change(token_lines("r", ["caller"]))
    with pytest.raises(PermissionDenied):
        call.revalidate()
    change("# nobody")
    with pytest.raises(Unauthenticated):
        call.revalidate()
