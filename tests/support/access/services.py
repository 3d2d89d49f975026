"""Both services, as authentication sees them."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import pytest

import adapter_store.core
import inference_svc.core
from adapter_store.registration.tenant_policy import UNGUARDED, parse_policy
from servicekit.auth import policy
from servicekit.auth.policy import Policy
from servicekit.auth.principal import Roles


class Service(NamedTuple):
    roles: Roles[Any]
    actions: type[Enum]
    parse: Callable[[str], Policy[Any]]
    unguarded: Policy[Any]


STORE = Service(adapter_store.core.ROLES, adapter_store.core.Action, parse_policy, UNGUARDED)
INFERENCE = Service(
    inference_svc.core.ROLES,
    inference_svc.core.Action,
    lambda text: policy.parse_policy(text, inference_svc.core.ROLES),
    Policy(anyone=inference_svc.core.ANYONE),
)
each_service = pytest.mark.parametrize(
    "service", [STORE, INFERENCE], ids=["adapter_store", "inference_svc"]
)
