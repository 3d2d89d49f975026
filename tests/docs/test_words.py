"""Pages speak to their readers, in sentences that one reading understands."""

from __future__ import annotations

import pytest

from tools.words import FOR_USERS, ROOT, code_of, count, pages, prose_of

MAX_WHATS, MIN_YOUS, MAX_STAND_INS = 2.6, 5.0, 0.5
"""Per 1,000 words. A shorter page may have as many "what"s as one of 1,000 words."""
MAX_SENTENCE_WORDS = 40
PRODUCT = ("loadout", "contract", "servicekit", "adapter_store", "inference_svc", "kernels")
MAX_STAND_INS_OF_CODE = 1.0
BESIDES = {"tools": (1.0, 0.8), "bench": (0.2, 0.2), "fuzz": (0.0, 0.0), "examples": (0.0, 0.0)}
"""Maximum "what"s and stand-ins per 1,000 words. `tools.words` itself lists such words."""


def test_prose_is_what_a_reader_reads() -> None:
    page = "What `a b` [is](it.md)?\n\n```sh\nwhat what\n```\n\n- You see one that\n- ends. Your.\n"
    assert "what what" not in prose_of(page)
    assert count("See test_what_is_read.").words == 2
    found = count(page)
    assert (found.words, found.whats, found.yous, found.stand_ins) == (9, 1, 2, 1)
    assert found.longest_words == 4


def test_nouns_have_names_and_sentences_end() -> None:
    wrong = []
    for page in pages():
        found = count((ROOT / page).read_text())
        scale = max(1.0, found.words / 1000)
        if found.whats > MAX_WHATS * scale:
            wrong.append(f'{page} says "what" {found.whats} times')
        if found.stand_ins > MAX_STAND_INS * scale:
            wrong.append(f'{page} says "one that" or the like {found.stand_ins} times')
        if found.longest_words > MAX_SENTENCE_WORDS:
            wrong.append(f"{page} has a sentence of {found.longest_words} words: {found.longest}")
    assert wrong == []


def test_pages_for_users_speak_to_them() -> None:
    counts = {page: count((ROOT / page).read_text()) for page in FOR_USERS}
    assert [page for page, each in counts.items() if each.rate(each.yous) < MIN_YOUS] == []


@pytest.mark.slow
def test_texts_of_tools_and_benchmarks_name_their_nouns() -> None:
    for folder, (max_whats, max_stand_ins) in BESIDES.items():
        found = count(code_of(folder))
        assert found.rate(found.whats) <= max_whats, folder
        assert found.rate(found.stand_ins) <= max_stand_ins, folder
        assert found.longest_words <= MAX_SENTENCE_WORDS, f"{folder}: {found.longest}"


@pytest.mark.slow
def test_texts_of_the_code_name_their_nouns() -> None:
    counts = {package: count(code_of(package)) for package in PRODUCT}
    assert [name for name, each in counts.items() if each.rate(each.whats) > MAX_WHATS] == []
    assert [
        name for name, each in counts.items() if each.rate(each.stand_ins) > MAX_STAND_INS_OF_CODE
    ] == []
