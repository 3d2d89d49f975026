"""Describes a service's settings, for `--help` and the documents."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ByteSize, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from servicekit.settings.service import ServiceSettings
from servicekit.settings.types import Group, Metavar

_HELP_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as `--help` and the documents show it.

    `metavar` is the form of its values, "" for a switch; `bounds` are those of a number, such as
    "≥ 1". `default` is "" where there is none.
    """

    name: str
    variable: str
    group: Group
    metavar: str
    bounds: tuple[str, ...]
    default: str
    meaning: str
    is_required: bool
    is_switch: bool
    is_list: bool
    is_secret: bool

    @property
    def key(self) -> str:
        return self.name.replace("_", "-")

    @property
    def flag(self) -> str:
        return f"--{self.key}"

    @property
    def flags(self) -> tuple[str, ...]:
        return (self.flag, f"--no-{self.key}") if self.is_switch else (self.flag,)


def describe(service: type[ServiceSettings]) -> list[Setting]:
    """Returns a service's settings in the order of its groups."""
    prefix = service.model_config["env_prefix"]
    found = [_setting(name, prefix, field) for name, field in service.model_fields.items()]
    return sorted(found, key=lambda setting: service.groups.index(setting.group))


def _setting(name: str, prefix: str, field: FieldInfo) -> Setting:
    plain, metadata = _plain(field.annotation)
    metadata = [*metadata, *field.metadata]
    metavar = {bool: "", int: "N", float: "NUMBER", ByteSize: "SIZE", Path: "FILE"}.get(
        plain, "TEXT"
    )
    if get_origin(plain) is Literal:
        metavar = "|".join(get_args(plain))
    metavar = next((each.text for each in reversed(metadata) if isinstance(each, Metavar)), metavar)
    return Setting(
        name=name,
        variable=f"{prefix}{name}".upper(),
        group=next(each for each in metadata if isinstance(each, Group)),
        metavar=metavar,
        bounds=_bounds(metadata),
        default=_default(field.default),
        meaning=" ".join((field.description or "").split()),
        is_required=field.is_required(),
        is_switch=plain is bool,
        is_list=get_origin(plain) is tuple,
        is_secret=plain is SecretStr,
    )


def _plain(annotation: Any) -> tuple[Any, list[Any]]:
    """Returns the type that an annotation is about, without `| None`, and its metadata."""
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        plain, more = _plain(inner)
        return plain, [*more, *metadata]
    if get_origin(annotation) in (Union, UnionType):
        [inner] = [each for each in get_args(annotation) if each is not NoneType]
        return _plain(inner)
    return annotation, []


def _bounds(metadata: Sequence[Any]) -> tuple[str, ...]:
    """Returns the bounds of a number but for ≥ 0, which goes without saying."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    flat = [inner for each in metadata for inner in getattr(each, "metadata", [each])]
    found = [
        (sign, getattr(each, name))
        for name, sign in signs.items()
        for each in flat
        if getattr(each, name, None) is not None
    ]
    return tuple(f"{sign} {bound:g}" for sign, bound in found if (sign, bound) != ("≥", 0))


def _default(value: Any) -> str:
    if value is PydanticUndefined or value is None or value in ("", ()):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, ByteSize):
        return value.human_readable().replace(".0", "")
    return f"{value:g}" if isinstance(value, float) else str(value)


def help_text(service: type[ServiceSettings]) -> str:
    """Returns what --help prints."""
    settings = describe(service)
    some = next(setting for setting in settings if setting.metavar)
    lines = [
        f"usage: {service.command} [FLAGS]",
        f"       python -m {service.module} [FLAGS]",
        "",
        *_wrapped(service.__doc__ or "", 0),
        "",
        *_wrapped(
            f"Every flag is also an environment variable ({some.flag} is {some.variable}) and a "
            f"key of the TOML file that --config names ({some.key}). A flag wins over the "
            "variable, the variable over the file, the file over the default. A SIZE is a number "
            "of bytes, such as 536870912 or 512MiB.",
            0,
        ),
    ]
    group = None
    for setting in settings:
        if setting.group != group:
            group = setting.group
            lines += ["", f"{group.title}:"]
        lines += [f"  {', '.join(setting.flags)} {setting.metavar}".rstrip()]
        note = f" Default: {setting.default}." if setting.default else ""
        note = " Required." if setting.is_required else note
        lines += _wrapped(setting.meaning + note, 6)
    lines += ["", "Example:", textwrap.indent(service.example, "  ")]
    return "\n".join(lines) + "\n"


def _wrapped(text: str, indent: int) -> list[str]:
    space = " " * indent
    return textwrap.wrap(
        " ".join(text.split()),
        _HELP_WIDTH,
        initial_indent=space,
        subsequent_indent=space,
        break_long_words=False,
        break_on_hyphens=False,
    )
