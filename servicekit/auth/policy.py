"""The policy file: whose tokens have which roles for which tenants.

One TOML file serves several services: a token may have roles of each. The file holds hashes of
tokens, never tokens, and no message quotes its values.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from servicekit.auth.principal import ActionT, Principal, Roles
from servicekit.errors import InvalidSetting, Unauthenticated
from servicekit.refs import DEFAULT_TENANT
from servicekit.settings.files import Contents, ReloadableFiles

ALL = "*"
"""Stands for all tenants."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Tenant = Annotated[str, Field(pattern=r"^([a-z0-9][a-z0-9._-]{0,62}|\*)$")]
TenantList = Annotated[list[Tenant], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class Policy(Generic[ActionT]):
    """`principals` by the sha256 of their tokens. `anyone` is every call's principal where no token
    is needed; None: each call needs one."""

    principals: Mapping[bytes, Principal[ActionT]] = field(default_factory=dict, repr=False)
    anyone: Principal[ActionT] | None = None

    def authenticate(self, token: str | None) -> Principal[ActionT]:
        """Returns whose token this is. Raises Unauthenticated, also for None: no token."""
        if self.anyone is not None:
            return self.anyone
        if token is None:
            raise Unauthenticated("authorization: a bearer token is needed")
        # The lookup is by hash, so its duration reveals nothing about any token.
        principal = self.principals.get(_hash(token))
        if principal is None:
            raise Unauthenticated("authorization: this token is not known")
        return principal


class Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class TokenTable(Table):
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    roles: Annotated[list[str], Field(min_length=1)]
    tenants: TenantList


class TokenTables(Table):
    """The part of the file that every service reads; a service derives its own tables."""

    tokens: dict[Name, TokenTable] = {}


class _OnlyTokens(TokenTables):
    """For a service without own tables: only the form of the others' is checked."""

    tenants: dict[str, dict[str, Any]] = {}
    keys: dict[str, dict[str, Any]] = {}


PolicyT = TypeVar("PolicyT", bound=Policy[Any])
TablesT = TypeVar("TablesT", bound=TokenTables)


def parse_policy(text: str, roles: Roles[ActionT]) -> Policy[ActionT]:
    """Returns the policy of a service that reads tokens only. Raises as `read_tables`."""
    return Policy(read_tables(text, _OnlyTokens, roles)[1])


def read_tables(
    text: str, tables: type[TablesT], roles: Roles[ActionT]
) -> tuple[TablesT, Mapping[bytes, Principal[ActionT]]]:
    """Returns the file's tables, and its principals by the sha256 of their tokens. Raises
    InvalidSetting naming the key, such as `tokens.trainer-a.roles`."""
    try:
        found = tables.model_validate(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError) as exc:
        raise _invalid("", str(exc)) from exc
    except ValidationError as exc:
        problem = exc.errors(include_input=False, include_url=False)[0]
        key = ".".join(str(part) for part in problem["loc"] if part != "[key]")
        is_unknown = problem["type"] == "extra_forbidden"
        what = "unknown key" if is_unknown else problem["msg"].removeprefix("Value error, ")
        raise _invalid(key, what) from exc
    return found, _principals(found.tokens, roles)


class PolicyFile(ReloadableFiles, Generic[PolicyT]):
    """The policy in force. Without a path it is `unguarded`, and a reload changes nothing."""

    def __init__(
        self, path: Path | None, parse: Callable[[str], PolicyT], unguarded: PolicyT
    ) -> None:
        """Raises InvalidSetting naming the key, and OSError if the file cannot be read."""
        self._path = path
        self._parse = parse
        self.policy = unguarded
        super().__init__("policy_file", *([] if path is None else [path]))

    def _use(self, contents: Contents) -> None:
        for data in contents:
            try:
                self.policy = self._parse(_text(data))
            except InvalidSetting as error:
                message = f"--policy-file {self._path}: {error.message}"
                raise InvalidSetting(message, subject=error.subject, reason=error.reason) from error


def _text(data: bytes) -> str:
    """Returns the text of a policy file. An empty one is refused: a write that failed leaves it,
    and it would lock everybody out."""
    if not data.strip():
        raise _invalid("", "empty; write a comment into a policy without tokens")
    try:
        return data.decode()
    except UnicodeDecodeError as exc:
        raise _invalid("", "not UTF-8") from exc


def confined_to(tenants: list[str]) -> frozenset[str] | None:
    """Returns the tenants that a list in the file names; None: all."""
    return None if ALL in tenants else frozenset(tenants)


def _principals(
    tables: Mapping[str, TokenTable], roles: Roles[ActionT]
) -> dict[bytes, Principal[ActionT]]:
    known = roles.allowed.keys() | roles.foreign
    found: dict[bytes, Principal[ActionT]] = {}
    for name, table in tables.items():
        for place, role in enumerate(table.roles):
            if role not in known:
                options = ", ".join(sorted(known))
                raise _invalid(f"tokens.{name}.roles.{place}", f"not one of {options}")
        key = bytes.fromhex(table.sha256)
        if key in found:
            raise _invalid(f"tokens.{name}.sha256", f"the same as of {found[key].name!r}")
        home = DEFAULT_TENANT if table.tenants[0] == ALL else table.tenants[0]
        found[key] = roles.principal(name, table.roles, confined_to(table.tenants), home)
    return found


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="surrogatepass")).digest()


def _invalid(key: str, message: str) -> InvalidSetting:
    return InvalidSetting(
        f"{key}: {message}" if key else message, subject=key, reason="POLICY_INVALID"
    )
