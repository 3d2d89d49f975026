"""The kinds of errors that there are."""

from __future__ import annotations

import inspect
from types import ModuleType

import inference_svc.errors
from servicekit import errors
from servicekit.errors import ServiceError

AT_START = (errors.InvalidSetting, inference_svc.errors.UnsupportedModel)
"""No call ends with these."""


def kinds_of(module: ModuleType) -> list[type[ServiceError]]:
    """The kinds that are defined there and that a call can end with."""
    return [
        kind
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if kind.__module__ == module.__name__
        and issubclass(kind, ServiceError)
        and kind is not ServiceError
        and kind not in AT_START
    ]


GENERAL = kinds_of(errors)
