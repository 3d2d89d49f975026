"""A short run of what `make fuzz` runs for long: its corpus, and what hypothesis thinks of."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz import campaign
from fuzz.mutations import mutate
from fuzz.refusals import TALLY
from fuzz.targets import SEPARATOR, SHARES, TARGETS

pytestmark = pytest.mark.slow

INPUTS = sorted(path for path in campaign.CORPUS.rglob("*") if path.is_file())
# What a mutation puts in: bytes, and the words of the formats.
WORDS = [
    line[1:-1].encode().decode("unicode_escape").encode("latin-1")
    for line in campaign.DICTIONARY.read_text().splitlines()
    if line.startswith('"')
]
SLOW_TARGETS = {"checkpoint", "folder"}
EXAMPLES = [40, pytest.param(200, marks=pytest.mark.long)]


def examples(target: str, count: int) -> settings:
    """Returns settings with so many examples; of targets that write files, with half as many."""
    count //= 1 + (target in SLOW_TARGETS)
    return settings(max_examples=count, deadline=None, derandomize=True)


def test_every_target_has_a_share_and_seeds():
    assert TARGETS.keys() == SHARES.keys() == {path.parent.name for path in INPUTS}
    assert sum(SHARES.values()) == 100


@pytest.mark.parametrize("target", TARGETS)
def test_a_seed_of_every_target_is_accepted(target):
    """Else mutations of them would reach nothing behind the first check."""
    accepted = 0
    for path in INPUTS:
        if path.parent.name == target:
            before = TALLY.accepted
            TARGETS[target](path.read_bytes())
            accepted += TALLY.accepted > before
            size = campaign.MAX_INPUT_BYTES_OF.get(target, campaign.MAX_INPUT_BYTES)
            assert path.stat().st_size <= size, "libFuzzer would cut it"
    assert accepted


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_the_corpus(path: Path):
    TARGETS[path.parent.name](path.read_bytes())


@pytest.mark.parametrize("count", EXAMPLES)
@pytest.mark.parametrize("target", TARGETS)
def test_any_bytes(target, count):
    @examples(target, count)
    @given(st.binary(max_size=300) | st.lists(st.sampled_from(WORDS), max_size=30).map(b"".join))
    def run(data: bytes) -> None:
        TARGETS[target](data)

    run()


@pytest.mark.parametrize("count", EXAMPLES)
@pytest.mark.parametrize("target", TARGETS)
def test_mutated_seeds(target, count):
    seeds = [path.read_bytes() for path in INPUTS if path.parent.name == target]
    pieces = st.binary(max_size=4) | st.sampled_from([*WORDS, SEPARATOR, b""])
    changes = st.lists(
        st.tuples(st.floats(0, 1), st.integers(0, 8), pieces), min_size=1, max_size=6
    )

    @examples(target, count)
    @given(st.sampled_from(seeds), changes)
    def run(seed: bytes, changed: list[tuple[float, int, bytes]]) -> None:
        data = bytearray(seed)
        for position, removed, piece in changed:
            start = int(position * len(data))
            data[start : start + removed] = piece
        TARGETS[target](bytes(data))

    run()


@pytest.mark.parametrize("count", EXAMPLES)
@pytest.mark.parametrize("target", TARGETS)
def test_seeds_whose_parts_are_changed(target, count):
    seeds = [path.read_bytes() for path in INPUTS if path.parent.name == target]

    @examples(target, count)
    @given(st.sampled_from(seeds), st.lists(st.integers(0, 1 << 31), min_size=1, max_size=4))
    def run(seed: bytes, changes: list[int]) -> None:
        data = seed
        for change in changes:
            data = mutate(target, data, change) or data
        TARGETS[target](data)

    run()


def test_changes_keep_the_form_of_an_input():
    """A fifth of them at least is read to its end, where changed bytes hardly ever are."""
    seeds = [path.read_bytes() for path in INPUTS if path.parent.name == "http"]
    before = TALLY.accepted
    for number in range(300):
        TARGETS["http"](mutate("http", seeds[number % len(seeds)], number) or b"")
    assert TALLY.accepted - before > 60


LOG = """resident: 276600 KiB, accepted: 40
#2 INITED cov: 12 ft: 13 corp: 1/1b exec/s: 0 rss: 60Mb
#900 NEW cov: 42 ft: 50
resident: 290000 KiB, accepted: 400
resident: 280000 KiB, accepted: 450
stat::number_of_executed_units: 1000
"""


def test_the_report_tells_executions_memory_and_faults():
    good = campaign.read_outcome("header", 1000, LOG, 0, 3.0)
    assert (good.executions, good.coverage, good.fault) == (1000, 42, "")
    assert good.accepted == 450
    assert round(good.peak_mib) == 283
    assert good.is_good
    crashed = campaign.read_outcome("config", 1000, LOG + "ERROR: libFuzzer: timeout\n", 70, 3.0)
    assert not crashed.is_good
    grown = campaign.read_outcome("index", 1000, LOG.replace("290000", "400000"), 0, 3.0)
    assert not grown.is_good
    lines = "\n".join(campaign.report([good, crashed, grown]))
    assert "3,000" in lines
    assert "45.0%" in lines
    assert "2 faults" in lines
    assert "libFuzzer: timeout" in lines


def test_a_target_that_did_not_run_or_refused_all_is_not_good():
    early = campaign.read_outcome("header", 1001, LOG, 0, 3.0)
    idle = campaign.read_outcome("header", 1, "", 0, 3.0)
    refused = LOG.replace("accepted: 400", "accepted: 0").replace("accepted: 450", "accepted: 0")
    refused = refused.replace("accepted: 40\n", "accepted: 0\n")
    strict = campaign.read_outcome("header", 1000, refused, 0, 3.0)
    assert strict.accepted == 0
    assert not any(each.is_good for each in (early, idle, strict))
    assert "3 faults" in "\n".join(campaign.report([early, idle, strict]))
    assert campaign.read_outcome("header", 900, refused, 0, 3.0).is_good, "too few to tell"
