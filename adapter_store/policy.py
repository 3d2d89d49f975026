"""The policy file: who may do what, how much, and whose signatures count.

One TOML file serves both services; `caller` and `operator` are roles of the inference service and
give nothing here. It holds hashes of tokens, never tokens, and no message quotes its values.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    field_validator,
)

from adapter_store.access import OPEN, Principal, Role
from adapter_store.core import Quota, Tenants
from servicekit.errors import FailedPrecondition, Unauthenticated
from servicekit.refs import DEFAULT_TENANT

ALL = "*"
"""Stands for all tenants; as the name of a tenant's table, for the defaults."""

ED25519_KEY_BYTES = 32

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
_Tenant = Annotated[str, Field(pattern=r"^([a-z0-9][a-z0-9._-]{0,62}|\*)$")]
_TenantList = Annotated[list[_Tenant], Field(min_length=1)]
_AnyRole = Literal["reader", "publisher", "server", "admin", "caller", "operator"]


@dataclass(frozen=True, slots=True)
class TenantPolicy:
    """What a tenant is held to; None: no limit."""

    max_adapters: int | None = None
    max_bytes: int | None = None
    registrations_per_minute: int | None = None
    require_signature: bool = False

    @property
    def quota(self) -> Quota:
        return Quota(self.max_adapters, self.max_bytes)


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """An Ed25519 public key whose signatures count for adapters of `tenants`."""

    name: str
    public_key: bytes
    tenants: Tenants


@dataclass(frozen=True, slots=True)
class Policy:
    """`principals` by the sha256 of their tokens. An open policy asks nobody for a token."""

    is_open: bool = True
    principals: Mapping[bytes, Principal] = field(default_factory=dict, repr=False)
    tenants: Mapping[str, TenantPolicy] = field(default_factory=dict)
    keys: Mapping[str, TrustedKey] = field(default_factory=dict)

    def tenant(self, name: str) -> TenantPolicy:
        return self.tenants.get(name) or self.tenants.get(ALL) or TenantPolicy()

    def authenticate(self, token: str | None) -> Principal:
        """Whose token this is. Raises Unauthenticated, also for None: no token."""
        if self.is_open:
            return OPEN
        if token is None:
            raise Unauthenticated("authorization: this store wants a bearer token")
        # Found by its hash, the time of the look-up tells nothing about any token.
        principal = self.principals.get(_hash(token))
        if principal is not None:
            return principal
        raise Unauthenticated("authorization: this token is not known")


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _TokenTable(_Table):
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    roles: Annotated[list[_AnyRole], Field(min_length=1)]
    tenants: _TenantList


class _TenantTable(_Table):
    max_adapters: NonNegativeInt | None = None
    max_bytes: Annotated[ByteSize, Field(ge=0)] | None = None
    registrations_per_minute: PositiveInt | None = None
    require_signature: bool | None = None


class _KeyTable(_Table):
    ed25519: str
    tenants: _TenantList

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


class _PolicyTables(_Table):
    tokens: dict[_Name, _TokenTable] = {}
    tenants: dict[_Tenant, _TenantTable] = {}
    keys: dict[_Name, _KeyTable] = {}


def parse_policy(text: str) -> Policy:
    """Raises FailedPrecondition naming the key, such as `tokens.trainer-a.roles`."""
    try:
        tables = _PolicyTables.model_validate(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError) as exc:
        raise _invalid("", str(exc)) from exc
    except ValidationError as exc:
        problem = exc.errors(include_input=False, include_url=False)[0]
        raise _invalid(_path(problem["loc"]), _what(problem["type"], problem["msg"])) from exc
    return Policy(
        is_open=False,
        principals=_principals(tables.tokens),
        tenants=_tenants(tables.tenants),
        keys={
            name: TrustedKey(name, base64.b64decode(table.ed25519), _confined_to(table.tenants))
            for name, table in tables.keys.items()
        },
    )


class PolicyFile:
    """The policy in force. Without a path it is open, and a reload changes nothing."""

    def __init__(self, path: Path | None) -> None:
        """Raises FailedPrecondition naming the key, and OSError if the file cannot be read."""
        self._path = path
        self.policy = Policy()
        self.reload()

    def reload(self) -> None:
        """Takes over the file as it is now. Raises as the constructor; the policy then stays."""
        if self._path is None:
            return
        try:
            self.policy = parse_policy(self._path.read_text(encoding="utf-8"))
        except FailedPrecondition as error:
            raise FailedPrecondition(
                f"policy_file {self._path}: {error.message}",
                subject=error.subject,
                reason=error.reason,
            ) from error
        except UnicodeDecodeError as exc:
            raise _invalid("", f"policy_file {self._path}: not UTF-8") from exc


def _principals(tables: Mapping[str, _TokenTable]) -> dict[bytes, Principal]:
    found: dict[bytes, Principal] = {}
    for name, table in tables.items():
        key = bytes.fromhex(table.sha256)
        if key in found:
            raise _invalid(f"tokens.{name}.sha256", f"the same as of {found[key].name!r}")
        home = table.tenants[0]
        found[key] = Principal(
            name,
            frozenset(Role(role) for role in table.roles if role in _OWN_ROLES),
            _confined_to(table.tenants),
            DEFAULT_TENANT if home == ALL else home,
        )
    return found


_OWN_ROLES = frozenset(role.value for role in Role)


def _tenants(tables: Mapping[str, _TenantTable]) -> dict[str, TenantPolicy]:
    """What a tenant's own table leaves open is as the table of `*` says."""
    defaults = _given(tables[ALL]) if ALL in tables else {}
    return {name: TenantPolicy(**(defaults | _given(table))) for name, table in tables.items()}


def _given(table: _TenantTable) -> dict[str, Any]:
    return table.model_dump(exclude_none=True)


def _confined_to(tenants: list[str]) -> Tenants:
    return None if ALL in tenants else frozenset(tenants)


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()


def _path(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location if part != "[key]")


def _what(kind: str, message: str) -> str:
    return "unknown key" if kind == "extra_forbidden" else message.removeprefix("Value error, ")


def _invalid(subject: str, message: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"{subject}: {message}" if subject else message, subject=subject, reason="POLICY_INVALID"
    )
