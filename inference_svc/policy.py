"""The policy file: whose tokens may do what here.

One TOML file serves both services. Quotas, keys and the roles of the adapter store are the
store's: they give nothing here, and only their place is checked. The file holds hashes of tokens,
never tokens, and no message quotes its values.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from inference_svc.access import OPEN, Principal, Role
from servicekit.errors import InvalidSetting, Unauthenticated
from servicekit.refs import DEFAULT_TENANT

ALL = "*"
"""Stands for all tenants."""

_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
_Tenant = Annotated[str, Field(pattern=r"^([a-z0-9][a-z0-9._-]{0,62}|\*)$")]
_AnyRole = Literal["reader", "publisher", "server", "admin", "caller", "operator"]
_OWN_ROLES = frozenset(role.value for role in Role)


@dataclass(frozen=True, slots=True)
class Policy:
    """`principals` by the sha256 of their tokens. An open policy asks nobody for a token."""

    is_open: bool = True
    principals: Mapping[bytes, Principal] = field(default_factory=dict, repr=False)

    def authenticate(self, token: str | None) -> Principal:
        """Whose token this is. Raises Unauthenticated, also for None: no token."""
        if self.is_open:
            return OPEN
        if token is None:
            raise Unauthenticated("authorization: this server wants a bearer token")
        # Found by its hash, the time of the look-up tells nothing about any token.
        principal = self.principals.get(_hash(token))
        if principal is None:
            raise Unauthenticated("authorization: this token is not known")
        return principal


class _TokenTable(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    roles: Annotated[list[_AnyRole], Field(min_length=1)]
    tenants: Annotated[list[_Tenant], Field(min_length=1)]


class _PolicyTables(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    tokens: dict[_Name, _TokenTable] = {}
    tenants: dict[str, dict[str, Any]] = {}
    keys: dict[str, dict[str, Any]] = {}


def parse_policy(text: str) -> Policy:
    """Raises InvalidSetting naming the key, such as `tokens.gateway.roles`."""
    try:
        tables = _PolicyTables.model_validate(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError) as exc:
        raise InvalidSetting(str(exc)) from exc
    except ValidationError as exc:
        problem = exc.errors(include_input=False, include_url=False)[0]
        path = ".".join(str(part) for part in problem["loc"] if part != "[key]")
        is_unknown = problem["type"] == "extra_forbidden"
        raise InvalidSetting(f"{path}: {'unknown key' if is_unknown else problem['msg']}") from exc
    return Policy(is_open=False, principals=_principals(tables.tokens))


class PolicyFile:
    """The policy in force. Without a path it is open, and a reload changes nothing."""

    def __init__(self, path: Path | None) -> None:
        """Raises InvalidSetting naming the key, and OSError if the file cannot be read."""
        self._path = path
        self.policy = Policy()
        self.reload()

    def reload(self) -> None:
        """Takes over the file as it is now. Raises as the constructor; the policy then stays."""
        if self._path is None:
            return
        try:
            self.policy = parse_policy(self._path.read_text(encoding="utf-8"))
        except InvalidSetting as error:
            raise InvalidSetting(f"policy_file {self._path}: {error}") from error
        except UnicodeDecodeError as exc:
            raise InvalidSetting(f"policy_file {self._path}: not UTF-8") from exc


def _principals(tables: Mapping[str, _TokenTable]) -> dict[bytes, Principal]:
    found: dict[bytes, Principal] = {}
    for name, table in tables.items():
        key = bytes.fromhex(table.sha256)
        if key in found:
            raise InvalidSetting(f"tokens.{name}.sha256: the same as of {found[key].name!r}")
        home = table.tenants[0]
        found[key] = Principal(
            name,
            frozenset(Role(role) for role in table.roles if role in _OWN_ROLES),
            None if ALL in table.tenants else frozenset(table.tenants),
            DEFAULT_TENANT if home == ALL else home,
        )
    return found


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()
