"""Reads settings.

A setting has one name: `--data-dir` as a flag, `LOADOUT_STORE_DATA_DIR` in the environment,
`data-dir` or `data_dir` in the TOML file that `--config` names. Flags win over the environment,
the environment over the file, the file over the default.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from servicekit.errors import InvalidSetting
from servicekit.settings.addresses import shown
from servicekit.settings.describe import Setting, describe, help_text, size
from servicekit.settings.service import ServiceSettings
from servicekit.settings.types import check_endpoint

_OTLP_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_OTLP_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

# Variables with a service's prefix that are none of its settings: an option of `loadout top`, and
# the variables that Kubernetes sets for a Service.
_OTHER_VARIABLES = re.compile(
    r"LOADOUT_INFERENCE_METRICS|.*_SERVICE_HOST|.*_SERVICE_PORT(_.*)?|.*_PORT(_\d+_.*)?"
)

S = TypeVar("S", bound=ServiceSettings)


def load_settings(service: type[S], arguments: Sequence[str]) -> S:
    """Returns the settings of flags, environment and file.

    Raises InvalidSetting with a line per problem. Prints the help and exits for --help and
    --help-all.
    """
    settings = {setting.name: setting for setting in describe(service)}
    flags = parse_flags(service, arguments)
    variables = _read_environment(service, settings)
    path = flags.get("config") or variables.get("config")
    file = _read_file(service, Path(path), settings) if path else {}
    try:
        loaded = service(**{**file, **variables, **flags})
        endpoint = "" if loaded.otlp_endpoint else standard_endpoint(os.environ)
        return loaded.model_copy(update={"otlp_endpoint": endpoint}) if endpoint else loaded
    except ValidationError as error:
        problems = error.errors(include_url=False)

    def named(problem: ErrorDetails) -> str:
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

    raise InvalidSetting("\n".join(named(problem) for problem in problems))


class _HelpAll(argparse.Action):
    """Prints the help of all settings and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest=argparse.SUPPRESS, nargs=0)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        assert isinstance(parser, _FlagParser)
        print(parser.format_help(show_all=True), end="")
        parser.exit()


class _FlagParser(argparse.ArgumentParser):
    """Reads flags; leaves their values to the settings' own types."""

    def __init__(self, service: type[ServiceSettings]) -> None:
        super().__init__(prog=service.command, allow_abbrev=False, add_help=True)
        self._service = service
        self.add_argument("--help-all", action=_HelpAll)

    def format_help(self, *, show_all: bool = False) -> str:
        return help_text(self._service, show_all=show_all)

    def error(self, message: str) -> NoReturn:
        raise InvalidSetting(message.removeprefix("argument "))


def parse_flags(service: type[ServiceSettings], arguments: Sequence[str]) -> dict[str, Any]:
    """Returns the values of flags by the names of their settings, unchecked.

    Raises InvalidSetting for a flag that is not there or has no value.
    """
    settings = {setting.name: setting for setting in describe(service)}
    parser = _FlagParser(service)
    for name, setting in settings.items():
        if not setting.has_flag:
            continue
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
        flag = unknown[0].split("=")[0]
        _refuse_former(service, flag, flag.removeprefix("--"), lambda setting: setting.flag)
        _refuse_file_setting(settings.values(), flag)
        known = [flag for setting in settings.values() for flag in setting.flags]
        raise InvalidSetting(_no_such(shown(flag) if "@" in flag else flag, known, "flag"))
    return {name: value for name, value in vars(found).items() if value is not None}


def _refuse_file_setting(settings: Iterable[Setting], flag: str) -> None:
    """Raises InvalidSetting if this is the name of a setting that has no flag."""
    for setting in settings:
        if not setting.has_flag and flag in (setting.flag, f"--no-{setting.key}"):
            raise InvalidSetting(
                f"{flag}: there is no such flag; set {setting.key} in the file that --config "
                f"names, or the variable {setting.variable}"
            )


def _refuse_former(
    service: type[ServiceSettings], shown: str, name: str, form: Callable[[Setting], str]
) -> None:
    """Raises InvalidSetting if a setting once had this name; `form` is how it is written there."""
    now = service.former.get(name.lower().replace("-", "_"))
    if now is not None:
        [setting] = [each for each in describe(service) if each.name == now]
        raise InvalidSetting(f"{shown}: is now called {form(setting)}")


def _read_environment(
    service: type[ServiceSettings], settings: Mapping[str, Setting]
) -> dict[str, Any]:
    prefix = service.model_config["env_prefix"].lower()
    for variable in os.environ:
        if variable.lower().startswith(prefix):
            name = variable[len(prefix) :]
            _refuse_former(service, variable, name, lambda setting: setting.variable)
    names = {setting.variable.lower(): name for name, setting in settings.items()}
    return {
        names[variable.lower()]: value
        for variable, value in os.environ.items()
        if variable.lower() in names
    }


def unknown_variables(service: type[ServiceSettings]) -> list[str]:
    """Returns a line for each variable with the service's prefix that sets nothing, such as a
    misspelled name; with the nearest name."""
    prefix = service.model_config["env_prefix"].upper()
    known = [setting.variable for setting in describe(service)]
    names = sorted(name for name in os.environ if name.upper().startswith(prefix))
    return [
        _no_such(name, known, "setting")
        for name in names
        if name.upper() not in known and not _OTHER_VARIABLES.fullmatch(name.upper())
    ]


def _read_file(
    service: type[ServiceSettings], path: Path, settings: Mapping[str, Setting]
) -> dict[str, Any]:
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
        _refuse_former(service, f"{path}: {key}", key, lambda setting: setting.key)
        if name not in settings or name == "config":
            keys = [setting.key for setting in settings.values() if setting.name != "config"]
            raise InvalidSetting(f"{path}: {_no_such(key, keys, 'setting')}")
        if name in found:
            raise InvalidSetting(f"{path}: {key}: given twice, with - and with _")
        found[name] = value
    return found


def _no_such(name: str, known: Sequence[str], kind: str) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else "--help-all lists all"
    return f"{name}: there is no such {kind}; {hint}"


_RULES = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be more than {gt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "bool_parsing": "must be true or false",
    "bool_type": "must be true or false",
    "int_parsing": "must be an integer",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "byte_size": "must be a size such as 64GiB or 512MiB",
    "byte_size_unit": "must be a size such as 64GiB or 512MiB",
    "string_type": "must be a text",
    "path_type": "must be a path",
    "tuple_type": "must be a list",
}


def _explain(problem: ErrorDetails, setting: Setting | None = None) -> str:
    """Returns the form that a value must have; the value itself, too, unless it is a secret."""
    if problem["type"] == "missing":
        return f"is required: {setting.meaning}" if setting else "is required"
    rule = _RULES.get(problem["type"])
    if rule is None:
        return problem["msg"].removeprefix("Value error, ")
    number = size if setting and setting.metavar == "SIZE" else "{:g}".format
    context = problem.get("ctx", {}).items()
    text = rule.format_map(
        {key: number(value) if isinstance(value, int | float) else value for key, value in context}
    )
    return text if setting and setting.is_secret else f"{text}, not {shown(problem['input'])}"


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
