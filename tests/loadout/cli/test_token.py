"""`loadout token`: what it prints is what both services take."""

from __future__ import annotations

import re

import pytest

from adapter_store.core import ROLES
from adapter_store.registration.tenant_policy import parse_policy
from loadout.cli.__main__ import main


@pytest.fixture
def run(capsys):
    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["token", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def token_in(err: str) -> str:
    found = re.fullmatch(r"token of \S+, shown this once: ([A-Za-z0-9_-]{43})\n", err)
    assert found, err
    return found[1]


@pytest.mark.parametrize("name", ["trainer-a", "ci.example", "a_b"])
def test_the_lines_are_a_policy_that_knows_the_token(run, name):
    code, out, err = run(name, "--role", "publisher", "--role", "caller", "--tenant", "team-a")
    assert code == 0
    token = token_in(err)
    assert token not in out
    who = parse_policy(out).authenticate(token)
    assert who == ROLES.principal(name, ["publisher"], frozenset({"team-a"}), "team-a")


def test_tokens_are_fresh_and_files_add_up(run):
    outputs = [run(name, "--tenant", "*", "--tenant", "team-a") for name in ("one", "two")]
    policy = parse_policy("".join(out for _, out, _ in outputs))
    names = [policy.authenticate(token_in(err)).name for _, _, err in outputs]
    assert names == ["one", "two"]


def test_the_least_by_default(run):
    _, out, err = run("someone")
    who = parse_policy(out).authenticate(token_in(err))
    assert (who.roles, who.tenants) == ({"reader"}, {"default"})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("a b",), "NAME"),
        (("",), "NAME"),
        (('x"]',), "NAME"),
        (("x", "--role", "owner"), "owner"),
        (("x", "--tenant", "Team"), "--tenant"),
        (("x", "--tenant", 'a"'), "--tenant"),
    ],
)
def test_what_no_policy_takes_makes_no_token(run, arguments, text):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert text in err


def test_token_in_a_file_of_its_own(run, tmp_path):
    file = tmp_path / "ci.token"
    code, out, err = run("ci", "--out", str(file))
    assert (code, err) == (0, f"token of ci: {file}\n")
    assert file.stat().st_mode & 0o777 == 0o600
    token = file.read_text().strip()
    assert token not in out
    assert parse_policy(out).authenticate(token).name == "ci"
    assert run("ci", "--out", str(file)) == (
        *(1, ""),
        f"loadout: --out: {file} exists: tokens are not overwritten\n",
    )
    assert file.read_text().strip() == token
