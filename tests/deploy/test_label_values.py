"""Whatever a rule or a panel looks for in a label, our code can set: a name that was changed there
would make an alert silent, and a panel empty."""

from __future__ import annotations

import json
import re

import pytest

from tests.deploy.label_values import known
from tests.support.deploy.manifests import ROOT
from tests.support.deploy.rules import matchers, metric, rules, selectors
from tools.dashboards.preview.reading import expressions

EXPRESSIONS = {
    **{name: rule["expr"] for kind in ("alert", "record") for name, rule in rules(kind).items()},
    **{
        f"{path.stem}-{index}": expression
        for path in sorted((ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
        for index, expression in enumerate(expressions(json.loads(path.read_text())))
    },
}
_ALTERNATIVES = re.compile(r"\|(?![^(]*\))")
"""Returns a regular expression's alternatives that are outside of its groups."""


def looked_for(expression: str) -> list[tuple[str, str, str]]:
    """Returns metric, label and each alternative of every selector's matchers."""
    return [
        (metric(selector), label, each)
        for selector in selectors(expression)
        for label, operator, value in matchers(selector)
        if "$" not in value
        for each in (_ALTERNATIVES.split(value) if "~" in operator else [re.escape(value)])
    ]


WITH_VALUES = {name: found for name, text in EXPRESSIONS.items() if (found := looked_for(text))}


def test_there_is_something_to_look_for() -> None:
    assert len(WITH_VALUES) > 30
    assert looked_for('rate(loadout_x_total{a="b.c",d=~"e|f(g|h)",i="$j"}[5m])') == [
        ("loadout_x_total", "a", r"b\.c"),
        ("loadout_x_total", "d", "e"),
        ("loadout_x_total", "d", "f(g|h)"),
    ]


@pytest.mark.parametrize("name", WITH_VALUES)
def test_what_is_looked_for_there_can_be(name: str) -> None:
    for of, label, pattern in WITH_VALUES[name]:
        values = known(of)[label]
        assert any(re.fullmatch(pattern, value) for value in values), (of, label, pattern, values)
