"""The jobs say what they should, and training never sees a held-out word."""

import re
from itertools import islice

import pytest

from loadout.demo import jobs

EXAMPLES = {
    "base": "hello",
    "upper": "HELLO",
    "double-letters": "hheelllloo",
    "pig-latin": "ellohay",
    "no-vowels": "hll",
    "rot13": "uryyb",
    "next": "ifmmp",
    "reverse": "olleh",
    "sort": "ehllo",
}


@pytest.mark.parametrize("job", jobs.JOBS, ids=lambda job: job.name)
def test_transform(job):
    assert jobs.expected(job, "hello") == EXAMPLES[job.name]


def test_shifts_wrap_around():
    by_name = {job.name: job for job in jobs.JOBS}
    assert jobs.expected(by_name["next"], "xyz") == "yza"
    assert jobs.expected(by_name["rot13"], "nmz") == "azm"


def test_there_are_eight_adapters_of_many_shapes():
    specs = [job.adapter for job in jobs.ADAPTER_JOBS]
    assert len(specs) == 8
    assert jobs.BASE.adapter is None
    assert {min(spec.rank for spec in specs), max(spec.rank for spec in specs)} == {4, 32}
    assert len({spec.rank for spec in specs}) >= 6
    assert len({spec.target_modules for spec in specs}) >= 5
    assert any(spec.use_rslora for spec in specs)
    assert any(spec.rank_pattern and spec.alpha_pattern for spec in specs)


def test_names_are_valid_references():
    names = [job.name for job in jobs.JOBS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,62}", name) for name in names)


@pytest.mark.parametrize("job", jobs.JOBS, ids=lambda job: job.name)
def test_training_and_held_out_words_are_disjoint(job):
    trained = list(islice(jobs.training_words(job, seed=7), 5000))
    held_out = jobs.held_out(job, 200, seed=0)
    assert not set(trained) & set(held_out)
    assert not any(map(jobs.is_held_out, trained))
    assert all(map(jobs.is_held_out, held_out))


@pytest.mark.parametrize("job", jobs.JOBS, ids=lambda job: job.name)
def test_held_out_words(job):
    words = jobs.held_out(job, 200, seed=3)
    assert len(set(words)) == 200
    assert words == jobs.held_out(job, 200, seed=3)
    assert words != jobs.held_out(job, 200, seed=4)
    for word in words:
        assert re.fullmatch("[a-z]+", word)
        assert jobs.MIN_LETTERS <= len(word) <= jobs.MAX_LETTERS
        assert 0 < len(jobs.expected(job, word)) <= jobs.MAX_ANSWER_LETTERS


def test_the_split_never_moves():
    """A different split would turn words that the committed weights were trained on into tests."""
    assert jobs.held_out(jobs.BASE, 4, seed=0) == ["ggywaiqh", "lqvzo", "yzlur", "odtrwm"]


def test_prompt():
    assert jobs.prompt("hello") == "hello="
