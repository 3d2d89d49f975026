"""The help page of a command: its options by group, with forms and defaults in plain words."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

CONNECTION, SECURITY = "Connection", "Security"
"""Titles of the options that name the services, and of those for the token and TLS."""
HELP_ALL = "--help-all"
_OPTIONS, _ARGUMENTS = "Options", "Arguments"
_ORDER = (_ARGUMENTS, _OPTIONS, CONNECTION, SECURITY)
_MAX_NAME_WIDTH = 30


class HelpCommand(TyperCommand):
    """A command whose help is grouped by its options' `rich_help_panel`. --help leaves the group
    Security out, --help-all shows it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[HELP_ALL] = HELP_ALL in args
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS]", *(usage_of(each) for each in self.params if is_argument(each))]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in _ORDER}
        for parameter in self.get_params(ctx):
            usual = _ARGUMENTS if is_argument(parameter) else _OPTIONS
            title = getattr(parameter, "rich_help_panel", None) or usual
            groups[title].append((name_of(parameter), _meaning(parameter)))
        hidden = () if ctx.meta.get(HELP_ALL) else groups.pop(SECURITY)
        for title, rows in groups.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows, col_max=_MAX_NAME_WIDTH)
        if hidden:
            formatter.write_paragraph()
            formatter.write_text(f"{HELP_ALL} adds {len(hidden)} options for the token and TLS.")


def is_argument(parameter: Any) -> bool:
    """Returns whether a parameter is known by its place rather than by a flag."""
    return bool(parameter.param_type_name == "argument")


def usage_of(argument: Any) -> str:
    """Returns an argument as a usage line shows it, such as [REF...]."""
    word = f"{argument.metavar}..." if argument.nargs == -1 else argument.metavar
    return word if argument.required else f"[{word}]"


def name_of(parameter: Any) -> str:
    """Returns an argument's form, or an option's flags and the form of its values."""
    if is_argument(parameter):
        return str(parameter.metavar)
    flags = ", ".join(sorted((*parameter.opts, *parameter.secondary_opts), key=len))
    return flags if parameter.is_flag else f"{flags} {parameter.metavar}"


def default_of(parameter: Any) -> str:
    """Returns the default of a parameter, "" where there is none to be shown."""
    if getattr(parameter, "is_flag", False) or parameter.required:
        return ""
    default = getattr(parameter.default, "value", parameter.default)
    if default in (None, ""):
        return ""
    return f"{default:g}" if isinstance(default, float) else str(default)


def _meaning(parameter: Any) -> str:
    text = parameter.help or ""
    if default := default_of(parameter):
        text += f" Default: {default}."
    if variable := getattr(parameter, "envvar", None):
        text += f" Variable: {variable}."
    return text
