"""The settings that all services have, and how settings are read.

A setting has one name: `--data-dir` as a flag, `LOADOUT_STORE_DATA_DIR` in the environment,
`data-dir` or `data_dir` in the TOML file that `--config` names. Flags win over the environment,
the environment over the file, the file over the default.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self, Union, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from servicekit.errors import InvalidSetting

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\s\[\]]+):([0-9]{1,5})")
_HELP_WIDTH = 100
_OTLP_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_OTLP_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def split_address(address: str) -> tuple[str, int]:
    """Returns "HOST:PORT" or "[V6]:PORT" as (host, port). Raises ValueError."""
    match = _ADDRESS.fullmatch(address)
    if not match or int(match[2]) > 65535:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return match[1].strip("[]"), int(match[2])


def check_endpoint(value: str) -> str:
    """Returns the address of a receiver of spans, "" for none. Raises ValueError."""
    found = urlsplit(value)
    if value and not (found.scheme in ("http", "https") and found.hostname and found.port):
        raise ValueError(f"{value!r} is not http(s)://HOST:PORT")
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


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def standard_endpoint(environment: Mapping[str, str]) -> str:
    """Returns the endpoint that OpenTelemetry's own variables name, or "". Raises
    InvalidSetting naming the variable."""
    is_disabled = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if is_disabled or environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return ""
    variable = next((name for name in _OTLP_ENDPOINTS if environment.get(name)), "")
    if not variable:
        return ""
    for name in _OTLP_PROTOCOLS:
        if environment.get(name, "grpc") != "grpc":
            raise InvalidSetting(
                f"{name}: only grpc is supported; OTEL_TRACES_EXPORTER=none disables tracing"
            )
    try:
        return check_endpoint(environment[variable])
    except ValueError as error:
        raise InvalidSetting(f"{variable}: {error}") from None


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
Endpoint = Annotated[str, AfterValidator(check_endpoint), Metavar("URL")]
Folder = Annotated[Path, Metavar("DIR")]
Bytes = Annotated[ByteSize, Field(gt=0)]
OptionalBytes = Annotated[ByteSize, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0), Metavar("SECONDS")]
PositiveSeconds = Annotated[float, Field(gt=0), Metavar("SECONDS")]
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_list), Metavar("NAME,...")]
Folders = Annotated[tuple[Path, ...], NoDecode, BeforeValidator(_split_list), Metavar("DIR,...")]

NETWORK = Group("Network")
ACCESS = Group("Access")
TLS = Group("TLS")
TELEMETRY = Group("Logs and traces")
PROCESS = Group("Process")


class ServiceSettings(BaseSettings):
    """What all services have. A service's class adds its own, and names itself."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    command: ClassVar[str]
    """The command that starts the service, such as "loadout store"."""
    module: ClassVar[str]
    """The module that starts it, such as "adapter_store"."""
    example: ClassVar[str]
    """A command line that ends the help."""
    groups: ClassVar[tuple[Group, ...]]
    """The groups in the order in which they are shown."""

    listen: Annotated[Address, NETWORK]
    """Address of the gRPC server. Port 0 takes a free port: see --ready-file."""

    metrics_listen: Annotated[Address, NETWORK]
    """Address of the HTTP server for Prometheus metrics. Port 0 takes a free port."""

    policy_file: Annotated[Path | None, ACCESS] = None
    """TOML file with tokens, roles, quotas and trusted keys; read again on SIGHUP. Without it every
    caller may do everything."""

    allow_open_access: Annotated[bool, ACCESS] = False
    """Accept calls from other machines also without --policy-file."""

    audit_file: Annotated[Path | None, ACCESS] = None
    """File to which one JSON line is appended for every change that a caller requests; opened again
    on SIGHUP."""

    tls_cert_file: Annotated[Path | None, TLS] = None
    """Certificate chain of this service, PEM; read again on SIGHUP. Without it there is no TLS."""

    tls_key_file: Annotated[Path | None, TLS] = None
    """Private key of --tls-cert-file, PEM."""

    tls_client_ca_file: Annotated[Path | None, TLS] = None
    """CA certificates, PEM. With it every caller needs a client certificate that one of them
    signed."""

    log_format: Annotated[Literal["text", "json"], BeforeValidator(_lower), TELEMETRY] = "text"
    """Form of a log line: text for people, json for machines."""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], BeforeValidator(_lower), TELEMETRY
    ] = "info"
    """Lowest level that is logged."""

    otlp_endpoint: Annotated[Endpoint, TELEMETRY] = ""
    """Receiver of spans over OTLP with gRPC, http(s)://HOST:PORT; needs the extra `otel`. Unset:
    OTEL_EXPORTER_OTLP_ENDPOINT, and without that there is no tracing."""

    trace_sample_ratio: Annotated[float | None, Field(ge=0, le=1), TELEMETRY] = None
    """Share of the calls that are traced, of those whose callers have not decided. Unset:
    OTEL_TRACES_SAMPLER, and without that all."""

    config: Annotated[Path | None, PROCESS] = None
    """TOML file with settings, named as the flags are. Flags and the environment win over it."""

    ready_file: Annotated[Path | None, PROCESS] = None
    """File that is written once the service is ready: JSON with the address of each server, such as
    "grpc" and "metrics"."""

    grace_seconds: Annotated[Seconds, PROCESS] = 30.0
    """Time that calls in progress get to finish after SIGTERM."""

    @classmethod
    def load(cls, arguments: Sequence[str]) -> Self:
        """Returns the settings of flags, environment and file.

        Raises InvalidSetting with a line per problem. Prints the help and exits for --help.
        """
        settings = {setting.name: setting for setting in describe(cls)}
        flags = parse_flags(cls, arguments)
        variables = _read_environment(settings)
        path = flags.get("config") or variables.get("config")
        file = _read_file(Path(path), settings) if path else {}
        try:
            loaded = cls(**{**file, **variables, **flags})
            endpoint = "" if loaded.otlp_endpoint else standard_endpoint(os.environ)
            return loaded.model_copy(update={"otlp_endpoint": endpoint}) if endpoint else loaded
        except ValidationError as error:
            problems = error.errors(include_url=False)

        def shown(problem: ErrorDetails) -> str:
            """The problem behind the name that the wrong value was given under."""
            setting = settings.get(str(problem["loc"][0])) if problem["loc"] else None
            if setting is None:
                return _explain(problem)
            name = setting.flag
            if setting.name not in flags and setting.name in variables:
                name = setting.variable
            elif setting.name not in flags and setting.name in file:
                name = f"{path}: {setting.key}"
            return f"{name}: {_explain(problem, setting)}"

        raise InvalidSetting("\n".join(shown(problem) for problem in problems))


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


class _FlagParser(argparse.ArgumentParser):
    """Reads flags; leaves their values to the settings' own types."""

    def __init__(self, service: type[ServiceSettings]) -> None:
        super().__init__(prog=service.command, allow_abbrev=False, add_help=True)
        self._service = service

    def format_help(self) -> str:
        return help_text(self._service)

    def error(self, message: str) -> NoReturn:
        raise InvalidSetting(message.removeprefix("argument "))


def parse_flags(service: type[ServiceSettings], arguments: Sequence[str]) -> dict[str, Any]:
    """Returns the values of flags by the names of their settings, unchecked.

    Raises InvalidSetting for a flag that is not there or has no value.
    """
    settings = {setting.name: setting for setting in describe(service)}
    parser = _FlagParser(service)
    for name, setting in settings.items():
        if setting.is_switch:
            on, off = setting.flags
            parser.add_argument(on, dest=name, nargs="?", const="true")
            parser.add_argument(off, dest=name, action="store_const", const="false")
        else:
            parser.add_argument(
                setting.flag, dest=name, action="append" if setting.is_list else "store"
            )
    found, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = [flag for setting in settings.values() for flag in setting.flags]
        raise InvalidSetting(_no_such(unknown[0].split("=")[0], known, "flag"))
    return {name: value for name, value in vars(found).items() if value is not None}


def _read_environment(settings: Mapping[str, Setting]) -> dict[str, Any]:
    names = {setting.variable.lower(): name for name, setting in settings.items()}
    return {
        names[variable.lower()]: value
        for variable, value in os.environ.items()
        if variable.lower() in names
    }


def _read_file(path: Path, settings: Mapping[str, Setting]) -> dict[str, Any]:
    """Raises InvalidSetting for a file that is not there, is not TOML, or has an unknown key."""
    try:
        read = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidSetting(f"--config: {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InvalidSetting(f"--config: {path} is not TOML: {error}") from error
    found: dict[str, Any] = {}
    for key, value in read.items():
        name = key.replace("-", "_")
        if name not in settings or name == "config":
            keys = [setting.key for setting in settings.values() if setting.name != "config"]
            raise InvalidSetting(f"{path}: {_no_such(key, keys, 'setting')}")
        if name in found:
            raise InvalidSetting(f"{path}: {key}: is there twice, with - and with _")
        found[name] = value
    return found


def _no_such(name: str, known: Sequence[str], kind: str) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else "--help shows all"
    return f"{name}: there is no such {kind}; {hint}"


_RULES = {
    "greater_than_equal": "must be at least {ge:g}",
    "greater_than": "must be more than {gt:g}",
    "less_than_equal": "must be at most {le:g}",
    "literal_error": "must be {expected}",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "int_parsing": "must be an integer",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "byte_size": "must be a size such as 512MiB",
    "byte_size_unit": "must be a size such as 512MiB",
    "string_type": "must be a text",
    "path_type": "must be a path",
    "tuple_type": "must be a list",
}


def _explain(problem: ErrorDetails, setting: Setting | None = None) -> str:
    """Returns what a value must be; the value itself, too, unless it is a secret."""
    if problem["type"] == "missing":
        return f"is required: {setting.meaning}" if setting else "is required"
    rule = _RULES.get(problem["type"])
    if rule is None:
        return problem["msg"].removeprefix("Value error, ")
    text = rule.format_map(problem.get("ctx", {}))
    return text if setting and setting.is_secret else f"{text}, not {problem['input']!r}"


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


_SECRET_VARIABLE = re.compile(
    r"(?i)(token|secret|passw|credential|api_?key|access_?key|private|headers)"
)
_PATH_VARIABLE = re.compile(r"(?i)(file|dir|path|home)$")
URL_PASSWORD = re.compile(r"://[^/@\s]*:([^/@\s]+)@")


def environment_secrets() -> list[str]:
    """Returns the values of variables that are named like secrets, and passwords in URLs."""
    found = []
    for name, value in os.environ.items():
        if _SECRET_VARIABLE.search(name) and not _PATH_VARIABLE.search(name):
            found.append(value)
        found += URL_PASSWORD.findall(value)
    return found
