"""The right calls of a hundred cases of the Berkeley Function Calling Leaderboard, in each form."""

from __future__ import annotations

import random

import pytest

from tests.inference_svc.text.answers.bfcl import cases
from tests.inference_svc.text.answers.written import WRITERS, cut, read, reader_of

MAX_CUTS = 12


@pytest.mark.parametrize("form", WRITERS)
def test_a_hundred_cases_are_read_however_they_are_cut(form: str) -> None:
    family = form.partition(" ")[0]
    chosen = random.Random(form)
    wrong = {}
    for case in cases():
        said = chosen.choice(("", "I look it up."))
        text = WRITERS[form](said, chosen.choice(("", "Which of them?")), case.calls)
        whole = read(reader_of(family, tools=case.tools), [text])
        places = [chosen.randrange(len(text)) for _ in range(chosen.randrange(1, MAX_CUTS))]
        streamed = read(reader_of(family, tools=case.tools), cut(text, places))
        found = whole.text, whole.objects, any(whole.errors), streamed
        if found != (said, case.calls, False, whole):
            wrong[case.name] = found
    assert wrong == {}
    assert len(cases()) == 100
