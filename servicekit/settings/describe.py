"""Describes a service's settings, for `--help` and the documents."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ByteSize, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from servicekit.settings.service import BASICS, ServiceSettings
from servicekit.settings.types import Group, Level, Metavar

_HELP_WIDTH = 100


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as `--help` and the documents show it.

    `metavar` is the form of its values, "" for a switch; `bounds` are a number's, such as "≥ 1".
    `default` is as it may be given, "" where there is none.
    """

    name: str
    variable: str
    group: Group
    level: Level
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
    def default_words(self) -> str:
        """The default as people say it: "7 days" rather than "604800"."""
        if self.is_switch:
            return {"true": "on", "false": "off"}[self.default]
        return duration(float(self.default)) if self.metavar == "SECONDS" else self.default

    @property
    def has_flag(self) -> bool:
        return self.level is not Level.FILE

    @property
    def flags(self) -> tuple[str, ...]:
        """Returns its flags: none for a setting of the file, two for a switch."""
        if not self.has_flag:
            return ()
        return (self.flag, f"--no-{self.key}") if self.is_switch else (self.flag,)


def describe(service: type[ServiceSettings]) -> list[Setting]:
    """Returns a service's settings in the order of its groups; its own basics before the settings
    of all services."""
    prefix = service.model_config["env_prefix"]
    found = [_setting(name, prefix, field) for name, field in service.model_fields.items()]
    own = list(service.__annotations__)

    def place(setting: Setting) -> tuple[int, int]:
        is_own_basic = setting.group == BASICS and setting.name in own
        position = own.index(setting.name) if is_own_basic else len(own)
        return service.groups.index(setting.group), position

    return sorted(found, key=place)


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
        level=next((each for each in metadata if isinstance(each, Level)), Level.FLAG),
        metavar=metavar,
        bounds=_bounds(metadata, size if metavar == "SIZE" else "{:g}".format),
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


def size(num_bytes: float) -> str:
    """Returns a number of bytes as a setting's value, such as "64 GiB"."""
    text = ByteSize(num_bytes).human_readable()
    return re.sub(r"(\.0)?([A-Z])", r" \2", text, count=1)


def duration(seconds: float) -> str:
    """Returns a time in words, in the largest unit of which it is a whole number."""
    unit_s, unit = next(
        (size_s, name)
        for size_s, name in _UNITS
        if size_s == 1 or (seconds >= size_s and seconds % size_s == 0)
    )
    number = seconds / unit_s
    return f"{number:g} {unit}{'' if number == 1 else 's'}"


_UNITS = ((86400, "day"), (3600, "hour"), (60, "minute"), (1, "second"))


def _bounds(metadata: Sequence[Any], shown: Callable[[float], str]) -> tuple[str, ...]:
    """Returns the bounds of a number but for ≥ 0, which goes without saying."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    flat = [inner for each in metadata for inner in getattr(each, "metadata", [each])]
    found = [
        (sign, getattr(each, name))
        for name, sign in signs.items()
        for each in flat
        if getattr(each, name, None) is not None
    ]
    return tuple(f"{sign} {shown(bound)}" for sign, bound in found if (sign, bound) != ("≥", 0))


def _default(value: Any) -> str:
    if value is PydanticUndefined or value is None or value in ("", ()):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, ByteSize):
        return size(value)
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def help_text(service: type[ServiceSettings], *, show_all: bool = False) -> str:
    """Returns the text that --help prints: the common flags; with `show_all` every setting, as
    --help-all prints it."""
    settings = describe(service)
    some = next(setting for setting in settings if setting.metavar)
    lines = [
        f"usage: {service.command} [FLAGS]",
        f"       python -m {service.module} [FLAGS]",
        "",
        *_wrapped(service.__doc__ or "", 0),
        "",
        *_wrapped(
            f"You can give a setting as a flag ({some.flag}), as an environment variable "
            f"({some.variable}) or as a key ({some.key}) of the TOML file that --config names. "
            "A flag overrides the variable, and the variable overrides the file. SIZE is a number "
            "of bytes, such as 64GiB or 512MiB.",
            0,
        ),
    ]
    with_flags = [each for each in settings if each.has_flag]
    listed = [each for each in with_flags if show_all or each.level is Level.COMMON]
    for group, members in groupby(listed, key=lambda setting: setting.group):
        lines += ["", f"{group.title}:"]
        for setting in members:
            lines += _help_lines(", ".join(setting.flags), setting)
    if show_all:
        lines += ["", "Without a flag (key of the file, environment variable):"]
        for setting in settings:
            if not setting.has_flag:
                lines += _help_lines(f"{setting.key}, {setting.variable}", setting)
    else:
        num_left = len(with_flags) - len(listed)
        lines += ["", f"--help-all lists {num_left} more flags and the settings without a flag."]
    lines += ["", "Example:", textwrap.indent(service.example, "  ")]
    return "\n".join(lines) + "\n"


def _help_lines(name: str, setting: Setting) -> list[str]:
    note = f" Default: {setting.default_words}." if setting.default else ""
    note = " Required." if setting.is_required else note
    return [*_flag_lines(name, setting.metavar), *_wrapped(setting.meaning + note, 6)]


def _flag_lines(name: str, metavar: str) -> list[str]:
    """Returns a flag and the form of its values, of which a long list has several lines."""
    line = f"  {name} {metavar}".rstrip()
    if len(line) <= _HELP_WIDTH:
        return [line]
    start = " " * (len(name) + 3)
    lines = textwrap.wrap(
        metavar.replace("|", "| "), _HELP_WIDTH - len(start), break_on_hyphens=False
    )
    first, *others = (each.replace("| ", "|") for each in lines)
    return [f"  {name} {first}", *(start + each for each in others)]


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
