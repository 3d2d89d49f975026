"""The demo's plan, results and hit rates."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from loadout.demo import report
from loadout.demo.adapters import Source, source_of
from loadout.demo.jobs import ADAPTER_JOBS, BASE, JOBS, expected, is_held_out
from loadout.demo.traffic import Answer, Task, plan
from loadout.errors import NotFound
from loadout.prometheus import parse


def test_plan_covers_all_jobs_evenly_and_mixed():
    tasks = plan(200)
    counts = {job.name: sum(task.job is job for task in tasks) for job in JOBS}
    assert len(tasks) == 200
    assert set(counts.values()) == {22, 23}
    assert all(is_held_out(task.word) for task in tasks)
    assert len({task.job.name for task in tasks[:32]}) >= 5
    assert tasks == plan(200)


def test_sources():
    assert [source_of(job) for job in ADAPTER_JOBS] == (
        [Source.FOLDER] * 3 + [Source.S3] * 3 + [Source.UPLOAD] * 2
    )


def answers(job, texts):
    return [Answer(Task(job, word), text, seconds) for word, text, seconds in texts]


def test_exact_match_and_median():
    reverse = next(job for job in ADAPTER_JOBS if job.name == "reverse")
    given = [("abc", "cba", 0.1), ("def", "fed", 0.3), ("ghi", "ihg ", 0.2)]
    base, adapter = report.by_job([*answers(reverse, given), *answers(BASE, [("abc", "abc", 1.0)])])
    assert (base.job, base.exact_match, base.is_good) == (BASE, 1.0, True)
    assert adapter.exact_match == pytest.approx(2 / 3)
    assert adapter.median_first_token_s == pytest.approx(0.2)
    assert not adapter.is_good


def test_95_percent_is_good():
    words = [f"a{chr(98 + i)}" for i in range(20)]
    right = [(word, expected(BASE, word), 0.1) for word in words]
    [result] = report.by_job(answers(BASE, [*right[:19], (words[19], "", 0.1)]))
    assert result.exact_match == 0.95
    assert result.is_good


def test_table_has_a_row_per_job():
    every = [
        answer for job in JOBS for answer in answers(job, [("abc", expected(job, "abc"), 0.0123)])
    ]
    console = Console(file=io.StringIO(), width=120)
    console.print(report.table(report.by_job(every)))
    text = console.file.getvalue()
    assert text.count("100.0%") == text.count("12 ms") == len(JOBS)
    assert all(job.title in text for job in JOBS)
    assert [text.count(source.value) for source in Source] == [3, 3, 2]


STORE = """
# TYPE loadout_store_tier_hits_total counter
loadout_store_tier_hits_total{tier="memory"} 6
loadout_store_tier_hits_total{tier="disk"} 0
# TYPE loadout_store_tier_misses_total counter
loadout_store_tier_misses_total{tier="memory"} 2
loadout_store_tier_misses_total{tier="disk"} 0
"""


def test_hit_rates():
    memory, disk, slots = report.hit_rates(
        parse(STORE),
        parse(
            'loadout_inference_tier_hits_total{tier="device"} 192\n'
            'loadout_inference_tier_misses_total{tier="device"} 8\n'
        ),
    )
    assert str(memory) == "store memory 75% (6 of 8)"
    assert str(disk) == "store disk no lookups (0 of 0)"
    assert str(slots) == "slots 96% (192 of 200)"


def test_a_metric_that_is_gone_is_no_zero():
    with pytest.raises(NotFound, match="0 metrics match loadout_inference_tier_hits_total"):
        report.hit_rates(parse(STORE), parse(""))
