"""The API pages follow the protos and the code, and the protos describe every declaration."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from loadout._rpc import calls
from tests.support.access import inference_roles as of_inference
from tests.support.error_kinds import kinds_of
from tests.support.store import access_calls as of_store
from tools.pages.api_docs import PATH, PROTOCOL_PATH, compile_protos, render
from tools.pages.api_facts import SERVICES, Service, exact_reasons, meanings, roles_of
from tools.pages.proto_comments import Comments, declarations

PAGES = (PATH, PROTOCOL_PATH)
ASKED = {"Adapter store": of_store.ALLOWED, "Inference service": of_inference.ALLOWED}
"""Who may, as tests ask the real services."""


def title(service: Service) -> str:
    return service.title


@pytest.fixture(scope="module")
def files():
    return compile_protos()


@pytest.mark.slow
def test_the_pages_are_up_to_date() -> None:
    assert {path: path.read_text() for path in PAGES} == render(), "run `make docs`"


def test_each_declaration_is_on_one_page(files) -> None:
    headings = [each for path in PAGES for each in headings_of(path.read_text())]
    for file in files.values():
        [service] = file.service
        prefix = file.package.removeprefix("loadout.")
        types = {m.name for m in (*file.message_type, *file.enum_type)}
        inline = {f"{m.name}{side}" for m in service.method for side in ("Request", "Response")}
        for name in {m.name for m in service.method} | types - inline:
            assert headings.count(f"{prefix}.{name}") == 1, name


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
    assert set(service.actions) == set(service.again) == names, "see tools/pages/api_facts.py"


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
        new = calls.NewAdapter("a", if_current_digest=condition)
        registration = calls.register(new, "file:///a")
        assert registration.repeatable == (not condition)
        assert calls.rollback("a", 1, condition).repeatable == (not condition)
    generation = calls.generate("a", "", 0, "", 0, "", {})
    assert generation.resume(None) is generation.request


def test_exact_reasons_are_found() -> None:
    store, inference = map(exact_reasons, SERVICES)
    assert {"DIGEST_MISMATCH", "SHAPE_MISMATCH", "RANK_TOO_LARGE", "TOKEN_TWICE"} <= set(store)
    assert {"CONFIG_INVALID", "TOKENIZER_INVALID"} <= set(store), "defaults of parameters"
    assert inference == []


def headings_of(page: str) -> list[str]:
    return re.findall(r"^#+ (.+)$", page, re.MULTILINE)


def anchors_of(page: str) -> Counter[str]:
    return Counter(
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings_of(page)
    )


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_link_leads_somewhere(path: Path) -> None:
    page = path.read_text()
    assert set(anchors_of(page).values()) == {1}
    links = set(re.findall(r"\]\(([^)#]*)#([^)]+)\)", page))
    assert any(name == "" for name, _ in links)
    for name, anchor in links:
        target = path.parent / name if name else path
        assert anchor in anchors_of(target.read_text()), f"{name}#{anchor}"
    assert all((path.parent / each).exists() for each in re.findall(r"\]\(([^)#]+)\)", page))
