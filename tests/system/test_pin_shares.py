"""One tenant's operator cannot pin all places of a server's adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from loadout import Client
from loadout.errors import ResourceExhausted
from loadout.retry import RetryPolicy
from tests.support.access.policies import token_lines, token_of, write_policy
from tests.support.models.zoo import Zoo
from tests.system.services import Services

pytestmark = pytest.mark.processes

ROLES = ["publisher", "caller", "operator"]
TOKENS = (
    token_lines("server", ["server"], ["*"]),
    token_lines("all-a", ROLES, ["team-a"]),
    token_lines("all-b", ROLES, ["team-b"]),
    token_lines("platform", ROLES, ["*"]),
)


def test_pins_are_a_place_with_shares(zoos: Callable[[str], Zoo], tmp_path: Path) -> None:
    policy, token = write_policy(tmp_path, *TOKENS), tmp_path / "token"
    token.write_text(token_of("server"))
    zoo = zoos("llama")
    services = Services(
        zoo,
        tmp_path / "services",
        store_flags=("--policy-file", str(policy)),
        inference_flags=(
            *("--policy-file", str(policy), "--store-token-file", str(token)),
            *("--max-loras", "5"),
        ),
    )
    names = list(zoo.adapter_dirs)[:4]
    with services:

        def client(name: str) -> Client:
            addresses = {
                "store": services.store_address,
                "inference": services.inference_address,
            }
            retry = RetryPolicy(max_attempts=1)
            return Client(**addresses, token=token_of(name), retry=retry)

        with client("all-a") as a, client("all-b") as b, client("platform") as platform:
            for each in (a, b):
                for name in names:
                    each.register(name, services.source(name))
            a.load(names[0], pin=True)
            a.load(names[1], pin=True)
            with pytest.raises(ResourceExhausted, match="pinned_adapters: tenant team-a") as caught:
                a.load(names[2], pin=True)
            assert caught.value.reason == "SHARE_EXCEEDED"
            a.load(names[2])
            with pytest.raises(ResourceExhausted):
                a.pin_resident(names[2])
            b.load(names[3], pin=True)
            assert not a.unpin_resident(names[0]).pinned
            assert not b.unpin_resident(names[3]).pinned
            b.load(names[1], pin=True)  # of equal content: one image
            assert b.unpin_resident(names[1]).pinned, "team-a pins it"
            assert not platform.unpin_resident(f"team-a/{names[1]}").pinned
            platform.pin_resident(f"team-a/{names[2]}")
    services.check_exit_codes()
