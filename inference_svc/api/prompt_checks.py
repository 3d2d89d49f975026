"""Checks of a call's prompts once they are tokens, by the caller's names of these."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from inference_svc.api.generate_call import GenerateCall
from servicekit.errors import InvalidArgument


@contextmanager
def naming_prompt(call: GenerateCall, index: int) -> Iterator[None]:
    """Has an error about one of several prompts name the caller's field of it."""
    try:
        yield
    except InvalidArgument as error:
        if error.subject != "prompt" or not call.prompts_field:
            raise
        field = f"{call.prompts_field}[{index}]"
        raise InvalidArgument(f"{field}: {error.message}", subject=field) from None


def check_prompt_tokens(call: GenerateCall, num_tokens: int) -> None:
    """Raises InvalidArgument if the prompts have too many tokens in all."""
    most, field = call.max_prompt_tokens, call.prompts_field
    if most is not None and num_tokens > most:
        raise InvalidArgument(
            f"{field} has more than {most} tokens in all: send it in several requests",
            subject=field,
        )
