"""Types of settings' values, with their checks and how `--help` writes them."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field
from pydantic_settings import NoDecode

from servicekit.settings.addresses import shown, split_address

_QUANTITY = re.compile(r"[0-9.]+\s*[KMGTPEkmgtpe][Ii]")


def check_endpoint(value: str) -> str:
    """Returns the address of a receiver of spans, "" for none. Raises ValueError."""
    found = urlsplit(value)
    is_one = found.scheme in ("http", "https") and found.hostname and found.port
    if value and (not is_one or "@" in found.netloc):
        raise ValueError(f"{shown(value)} is not http(s)://HOST:PORT")
    return value


def split_commas(*texts: str) -> tuple[str, ...]:
    """Returns the parts of texts that are separated by commas."""
    parts = (part.strip() for text in texts for part in text.split(","))
    return tuple(part for part in parts if part)


def _split_list(value: object) -> object:
    if isinstance(value, str):
        return split_commas(value)
    return split_commas(*map(str, value)) if isinstance(value, list | tuple) else value


def _check_address(value: str) -> str:
    split_address(value)
    return value


def _check_optional_address(value: str) -> str:
    return _check_address(value) if value else value


def _check_addresses(value: str) -> str:
    for address in split_commas(value):
        split_address(address)
    return value


def _check_meeting(value: str) -> str:
    """Returns the address at which machines meet, "" for none. Raises ValueError."""
    if value:
        host, port = split_address(value)
        if port == 0:
            raise ValueError(f"{value} has no port that other machines could know: choose one")
        if host in ("0.0.0.0", "::"):
            raise ValueError(f"{value} is no address that other machines reach: name machine 0's")
    return value


def _complete_unit(value: object) -> object:
    """Returns a size as Kubernetes writes one, such as 64Gi, with the B that it leaves out."""
    if isinstance(value, str) and _QUANTITY.fullmatch(value.strip()):
        return f"{value.strip()}B"
    return value


def lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


class Level(enum.Enum):
    """How far up a setting is shown. A setting without a level has a flag that only --help-all
    lists."""

    COMMON = enum.auto()
    """Listed by --help."""
    FLAG = enum.auto()
    """Listed by --help-all."""
    FILE = enum.auto()
    """Has no flag: it is set in the settings file or by its environment variable."""


@dataclass(frozen=True, slots=True)
class Group:
    """The settings that `--help` and the documents show together."""

    title: str


@dataclass(frozen=True, slots=True)
class Metavar:
    """How the values of a type are written in `--help`."""

    text: str


Address = Annotated[str, AfterValidator(_check_address), Metavar("HOST:PORT")]
OptionalAddress = Annotated[str, AfterValidator(_check_optional_address), Metavar("HOST:PORT")]
Addresses = Annotated[str, AfterValidator(_check_addresses), Metavar("HOST:PORT,...")]
Meeting = Annotated[str, AfterValidator(_check_meeting), Metavar("LEADER:PORT")]
Endpoint = Annotated[str, AfterValidator(check_endpoint), Metavar("URL")]
Folder = Annotated[Path, Metavar("DIR")]
Size = Annotated[ByteSize, BeforeValidator(_complete_unit)]
Bytes = Annotated[Size, Field(gt=0)]
OptionalBytes = Annotated[Size, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0), Metavar("SECONDS")]
PositiveSeconds = Annotated[float, Field(gt=0), Metavar("SECONDS")]
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_list), Metavar("NAME,...")]
Folders = Annotated[tuple[Path, ...], NoDecode, BeforeValidator(_split_list), Metavar("DIR,...")]
