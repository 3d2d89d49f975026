"""The store's part of the policy file: limits of tenants, and the keys that are trusted."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator

from adapter_store.core import ANYONE, ROLES, Action, Quota, Tenants
from servicekit.auth.policy import (
    ALL,
    Name,
    Policy,
    PolicyFile,
    Table,
    Tenant,
    TenantList,
    TokenTables,
    confined_to,
    read_tables,
)
from servicekit.settings.types import OptionalBytes

ED25519_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """The limits of a tenant; None: no limit."""

    max_adapters: int | None = None
    max_bytes: int | None = None
    registrations_per_minute: int | None = None
    require_signature: bool = False
    max_versions: int | None = None
    """Of a name: each registration deletes the oldest ones beyond."""

    @property
    def quota(self) -> Quota:
        return Quota(self.max_adapters, self.max_bytes)

    def keep(self, requested: int) -> int:
        """Returns how many versions a registration leaves that asks for `requested`; 0: all."""
        limits = (limit for limit in (requested, self.max_versions) if limit)
        return min(limits, default=0)


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """An Ed25519 public key whose signatures count for adapters of `tenants`."""

    name: str
    public_key: bytes
    tenants: Tenants


@dataclass(frozen=True, slots=True)
class StorePolicy(Policy[Action]):
    tenants: Mapping[str, TenantPolicy] = field(default_factory=dict)
    keys: Mapping[str, TrustedKey] = field(default_factory=dict)

    def tenant(self, name: str) -> TenantPolicy:
        return self.tenants.get(name) or self.tenants.get(ALL) or TenantPolicy()


StorePolicyFile: TypeAlias = PolicyFile[StorePolicy]

UNGUARDED = StorePolicy(anyone=ANYONE)
"""Every caller may do everything."""


class _TenantTable(Table):
    max_adapters: NonNegativeInt | None = None
    max_bytes: OptionalBytes | None = None
    registrations_per_minute: PositiveInt | None = None
    require_signature: bool | None = None
    max_versions: PositiveInt | None = None


class _KeyTable(Table):
    ed25519: str
    tenants: TenantList

    @field_validator("ed25519")
    @classmethod
    def _check_key(cls, value: str) -> str:
        try:
            is_key = len(base64.b64decode(value, validate=True)) == ED25519_KEY_BYTES
        except binascii.Error:
            is_key = False
        if not is_key:
            raise ValueError(f"not the base64 of {ED25519_KEY_BYTES} bytes")
        return value


class _Tables(TokenTables):
    tenants: dict[Tenant, _TenantTable] = Field(default_factory=dict)
    keys: dict[Name, _KeyTable] = Field(default_factory=dict)


def open_policy(path: Path | None) -> StorePolicyFile:
    """Raises InvalidSetting naming the key, and OSError if the file cannot be read."""
    return PolicyFile(path, parse_policy, UNGUARDED)


def parse_policy(text: str) -> StorePolicy:
    """Raises InvalidSetting naming the key, such as `tenants.team-a.max_bytes`."""
    tables, principals = read_tables(text, _Tables, ROLES)
    return StorePolicy(
        principals,
        tenants=_tenants(tables.tenants),
        keys={
            name: TrustedKey(name, base64.b64decode(table.ed25519), confined_to(table.tenants))
            for name, table in tables.keys.items()
        },
    )


def _tenants(tables: Mapping[str, _TenantTable]) -> dict[str, TenantPolicy]:
    """A tenant's own table takes precedence over the table of `*`, key by key."""
    defaults = _given(tables[ALL]) if ALL in tables else {}
    return {name: TenantPolicy(**(defaults | _given(table))) for name, table in tables.items()}


def _given(table: _TenantTable) -> dict[str, Any]:
    return table.model_dump(exclude_none=True)
