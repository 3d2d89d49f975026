"""How many examples the property tests try: a fifth in the suite, all in `make test-long`."""

from __future__ import annotations

from hypothesis import settings

ALL, FEW = "long", "tests"
"""Names of hypothesis' profiles, for `--hypothesis-profile`."""
NUM_ALL, NUM_FEW = 100, 20


def install() -> None:
    """Has tests try few examples, unless the command line names a profile."""
    for name, number in ((ALL, NUM_ALL), (FEW, NUM_FEW)):
        # A busy machine is no fault.
        settings.register_profile(name, deadline=None, max_examples=number)
    settings.load_profile(FEW)


def examples(number: int) -> int:
    """Returns how many examples to try of `number`, for a test that does not try 100."""
    return max(1, number * settings().max_examples // NUM_ALL)
