"""docs/api.md is what the protos and the code say, and the protos say something of everything."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from loadout._rpc import calls
from tests.adapter_store.service import access_calls as of_store
from tests.servicekit.error_kinds import kinds_of
from tests.system import test_access_table as of_inference
from tools.api_docs import PATH, compile_protos, render
from tools.api_facts import SERVICES, Service, exact_reasons, meanings, roles_of
from tools.proto_comments import Comments, declarations

ASKED = {"Adapter store": of_store.ALLOWED, "Inference service": of_inference.ALLOWED}
"""Who may, as tests ask the real services."""


def title(service: Service) -> str:
    return service.title


@pytest.fixture(scope="module")
def files():
    return compile_protos()


def test_the_page_is_up_to_date() -> None:
    assert PATH.read_text() == render(), "run `make docs`"


@pytest.mark.parametrize("service", SERVICES, ids=title)
def test_every_declaration_has_a_comment(files, service: Service) -> None:
    file = files[service.file]
    comments = Comments(file)
    names = [name for name, path in declarations(file) if not comments.at(*path)]
    assert names == []


@pytest.mark.parametrize("service", SERVICES, ids=title)
def test_the_facts_have_every_call(files, service: Service) -> None:
    [declared] = files[service.file].service
    names = {method.name for method in declared.method}
    assert set(service.actions) == set(service.again) == names, "see tools/api_facts.py"


@pytest.mark.parametrize("service", SERVICES, ids=title)
def test_who_may_is_what_the_services_answer(service: Service) -> None:
    roles = set(service.roles.allowed)
    for name, allowed in ASKED[service.title].items():
        # Only root is of all tenants, which some calls want besides the role.
        if allowed != {"root"}:
            assert set(roles_of(service.roles, service.actions[name])) == allowed & roles, name


@pytest.mark.parametrize("service", SERVICES, ids=title)
def test_every_error_is_in_the_table(service: Service) -> None:
    assert {kind for kind, _ in meanings(service)} >= set(kinds_of(service.errors))


def test_what_may_be_repeated_is_what_the_client_does() -> None:
    for condition in ("", "sha256:0"):
        registration = calls.register("a", "file:///a", "", "", condition, False, {})
        assert registration.repeatable == (not condition)
        assert calls.rollback("a", 1, condition).repeatable == (not condition)
    generation = calls.generate("a", "", 0, "", 0, "", {})
    assert generation.resume(None) is generation.request


def test_exact_reasons_are_found() -> None:
    [store, inference] = (exact_reasons(service.folder) for service in SERVICES)
    assert {"DISK_FULL", "DIGEST_MISMATCH", "SHAPE_MISMATCH", "RANK_TOO_LARGE"} <= set(store)
    assert inference == []


def test_every_link_leads_somewhere() -> None:
    page = PATH.read_text()
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    anchors = Counter(re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings)
    assert set(anchors.values()) == {1}
    linked = set(re.findall(r"\]\(#([^)]+)\)", page))
    assert linked
    assert linked <= set(anchors)
    assert all((PATH.parent / path).exists() for path in re.findall(r"\]\((?!#)([^)]+)\)", page))
