"""docs/observability/metrics.md is what the code defines."""

from __future__ import annotations

import re
from collections import Counter

from adapter_store.metrics import definitions as store
from inference_svc.metrics import definitions as inference
from tools.pages.metric_docs import PATH, render

LEGAL = re.compile(r"[a-z_:][a-z0-9_:]*")
UNITS = ("_seconds", "_bytes")


def test_the_page_is_up_to_date() -> None:
    assert PATH.read_text() == render(), "run `make docs`"


def test_names_follow_the_rules() -> None:
    """Prometheus': legal, no suffix of another kind, a unit where there is one, plural labels not
    among them."""
    for service in (store, inference):
        definitions = [each for section in service.SECTIONS.values() for each in section]
        assert len(service.DEFINITIONS) == len(definitions), "a name is defined twice"
        for definition in definitions:
            assert LEGAL.fullmatch(definition.name), definition.name
            assert not definition.name.endswith(("_total", "_count", "_sum", "_bucket"))
            assert definition.help.endswith("."), definition.name
            if definition.kind.value in ("histogram", "summary"):
                assert definition.name.endswith(UNITS), definition.name
            assert all(LEGAL.fullmatch(label) for label in definition.labels)


def test_every_metric_has_one_row() -> None:
    rows = Counter(re.findall(r"^\| `([^`]+)`", PATH.read_text(), re.MULTILINE))
    for service in (store, inference):
        for definition in service.DEFINITIONS.values():
            is_of_both = definition.name.startswith("process_")
            assert rows[definition.exposed_name] == 1 + is_of_both, definition.name
