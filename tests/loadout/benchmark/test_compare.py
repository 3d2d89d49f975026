"""What has become worse, what can be compared, and files that are none of ours."""

from __future__ import annotations

import copy
import json

import pytest

from loadout.benchmark.compare import differences, read_tolerances, verdicts
from loadout.benchmark.measure import METRICS, medians, percentile
from loadout.benchmark.result import BadResult, Result, parse
from loadout.benchmark.workload import BASE, Workload, plan
from loadout.errors import InvalidArgument

FIGURES = dict.fromkeys(METRICS, 1.0)
RESULT = Result({"workload": {"seed": 0}, "adapters": [{"rank": 8}]}, {"time": "now"}, [FIGURES])


@pytest.mark.parametrize("name", METRICS)
def test_worse_is_the_direction_of_the_metric(name):
    worse = 0.8 if METRICS[name].is_more_better else 1.25
    for figure, is_regression in ((worse, True), (1 / worse, False), (1.0, False)):
        [verdict] = verdicts({name: 1.0}, {name: figure}, {name: 0.1})
        assert verdict.is_regression == is_regression
    [verdict] = verdicts({name: 1.0}, {name: worse}, {name: 0.3})
    assert not verdict.is_regression


def test_tolerances_of_all_and_of_one():
    assert read_tolerances([]) == {m.name: m.tolerance for m in METRICS.values()}
    found = read_tolerances(["inter_token_p50_seconds=0.5", "7%"])
    assert found.pop("inter_token_p50_seconds") == 0.5
    assert set(found.values()) == {0.07}


@pytest.mark.parametrize("text", ["x", "-1%", "nan", "inf%", "nonsense=1%", "=1%", ""])
def test_what_is_no_tolerance(text):
    with pytest.raises(InvalidArgument):
        read_tolerances([text])


def test_differences_name_their_path():
    now = copy.deepcopy(RESULT.conditions)
    assert differences(RESULT.conditions, now) == []
    now["workload"]["seed"] = 1
    now["adapters"].append({"rank": 64})
    found = {(each.path, each.before, each.now) for each in differences(RESULT.conditions, now)}
    assert found == {
        ("workload.seed", 0, 1),
        ("adapters.count", 1, 2),
        ("adapters[1].rank", None, 64),
    }


def test_a_result_comes_back_as_it_was():
    assert parse(RESULT.to_json()) == RESULT


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(format=2), "format 1"),
        (lambda d: d.pop("conditions"), "no conditions"),
        (lambda d: d.update(facts=[]), "no facts"),
        (lambda d: d.update(rounds=[]), "no rounds"),
        (lambda d: d["rounds"].append({"tokens_per_second": 1}), "different metrics"),
        (lambda d: d.update(rounds=[{"nonsense": 1}]), "unknown metric 'nonsense'"),
        (lambda d: d["rounds"][0].update(tokens_per_second=0), "0 for tokens_per_second"),
        (lambda d: d["rounds"][0].update(tokens_per_second=True), "True for"),
        (lambda d: d["rounds"][0].update(tokens_per_second="1"), "'1' for"),
    ],
)
def test_what_is_no_result_of_ours(change, message):
    document = json.loads(RESULT.to_json())
    change(document)
    with pytest.raises(BadResult, match=message):
        parse(json.dumps(document))


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, "null"])
def test_what_is_no_document(text):
    with pytest.raises(BadResult):
        parse(text)


def test_percentiles_are_by_nearest_rank():
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0, 50, 99, 100)] == [1.0, 50.0, 99.0, 100.0]
    assert percentile([3.0], 50) == 3.0
    assert medians([{"tokens_per_second": v} for v in (1.0, 9.0, 2.0)]) == {"tokens_per_second": 2}


def test_a_plan_is_the_same_for_the_same_settings_and_mixed():
    workload = Workload(num_requests=30, prompt_chars=50)
    first = plan(workload, 1, ["a", "b"])
    assert first == plan(workload, 1, ["a", "b"])
    assert first != plan(workload, 2, ["a", "b"])
    assert [each.adapter for each in first].count(BASE) == 10
    assert {len(each.prompt) for each in first} == {50}
    assert len({each.prompt for each in first}) == 30
