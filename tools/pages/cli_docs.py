"""Writes the reference of the `loadout` command into docs/cli.md: `python -m tools.pages.cli_docs`.

The text above the marker is written by hand.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer.main

from adapter_store.images.plan import check
from loadout import types
from loadout.cli import options
from loadout.cli.app import app
from loadout.cli.connection import Connection
from loadout.cli.help import CONNECTION, SECURITY, default_of, is_argument, name_of, usage_of
from loadout.cli.server import top_overview
from loadout.verify import compare
from loadout.verify import run as verification

PATH = Path(__file__).parents[2] / "docs" / "cli.md"
MARKER = "<!-- From here on written by `make docs`: change loadout/cli. -->"

OUTPUTS = {
    "adapters": "[Adapter]",
    "versions": "{current_version: int, versions: [Adapter]}",
    "check": "Report and {engine: null or {name: str, notes: [{feature, does, what, source}]}}",
    "layouts": "[Layout]",
    "register, rollback": "Registration",
    "prune": "{deleted_versions: [int]}",
    "classify": "[{label: str, label_index: int, probabilities: [float]}]",
    "load, residents": "[{replica: str} and ResidentAdapter]",
    "inspect": "[{replica: str} and InspectedAdapter]",
    "unload": "[{replica: str, ref: str, freed_bytes: int}]",
    "pin, unpin": "{inference: [{replica: str} and ResidentAdapter], store: [Adapter]}",
    "pause": "[{replica: str, held_requests: int}]",
    "resume": "[{replica: str}]",
    "sleep": "[{replica: str, freed_bytes: int}]",
    "wake": "[{replica: str, seconds: float}]",
    "info": "{server: ServerInfo or Error, store: StoreStatus or Error}",
    "top": "Overview",
    "verify": "Verification",
    "bench": "the file of `--out`: {format, conditions, facts, medians, rounds}",
}
TYPES = (
    check.Report,
    check.ModuleContent,
    check.ServerReport,
    check.Refusal,
    verification.Verification,
    verification.VerifiedPrompt,
    compare.Measured,
    types.Adapter,
    types.LayoutState,
    types.ServerVerdict,
    types.Layout,
    types.SourceFile,
    types.Registration,
    types.ResidentAdapter,
    types.InspectedAdapter,
    types.ResidentExtent,
    types.ResidentTarget,
    types.ResidentSegment,
    types.OperationGroup,
    types.ServerInfo,
    types.ServerLimits,
    types.SamplingDefaults,
    types.ExpertLayers,
    types.RecurrentStates,
    types.WeightFormat,
    types.Processor,
    types.RankStatus,
    types.EmbeddingInfo,
    types.ClassifierInfo,
    types.MemoryUse,
    types.StoreStatus,
    types.TierStatus,
    top_overview.Overview,
    top_overview.Traffic,
    top_overview.Quantiles,
    top_overview.StateUse,
    top_overview.Tier,
    top_overview.AdapterRates,
    top_overview.RankRates,
)
"""The types of outputs; Error is written out below."""
SHARED = {"--" + field.name.replace("_", "-") for field in dataclasses.fields(Connection)}
COMMON = {
    typing.get_args(option)[1].help for option in (options.Json, options.Inference, options.Store)
}
"""Meanings of options that several commands have."""
MORE = {
    "top": "the-view-of-top",
    "load": "resident-adapters",
    "inspect": "resident-adapters",
    "debug": "the-archive-of-debug",
    "profile": "the-trace-of-profile",
    "bench": "the-figures-of-bench",
}
"""Sections above the reference that tell more about a command."""
GROUPS = {
    "demo": "Run Loadout",
    "register": "Adapters in the store",
    "generate": "Ask the model",
    "load": "Adapters in a server's memory",
    "pause": "Pause and sleep",
    "info": "Watch, measure and diagnose",
    "digest": "Adapter folders, keys and tokens",
}
"""Titles in the reference, by the first command of each group."""
MANY = 3
"""The reference describes an argument or option only once if this many commands have it."""


def render() -> str:
    """Returns the content of docs/cli.md."""
    by_hand = PATH.read_text().partition(MARKER)[0]
    return by_hand + "\n".join([MARKER, "", *_reference(), *_json_output()])


def _is_shared(option: Any) -> bool:
    """Returns whether an option is for the connection; some commands have their own --tenant."""
    panel = getattr(option, "rich_help_panel", None)
    return option.opts[0] in SHARED and panel in (CONNECTION, SECURITY)


def _is_common(option: Any) -> bool:
    """Returns whether all commands share this option; `top` has its own --json."""
    return option.help in COMMON


def _repeated(commands: Iterable[Any]) -> dict[tuple[str, str], Any]:
    """Returns other arguments and options that many commands have, by name and meaning."""
    found: dict[tuple[str, str], list[Any]] = {}
    for command in commands:
        for each in command.params:
            if each.help and not _is_common(each) and not _is_shared(each):
                found.setdefault((each.name, each.help), []).append(each)
    return {key: each[0] for key, each in found.items() if len(each) >= MANY}


def _reference() -> Iterator[str]:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    yield "## Reference"
    yield ""
    yield from _overview(commands)
    yield "Many commands have these arguments and options. A command's usage line shows them. Every"
    yield "command that takes an address also takes the options for the tenant, the token and TLS."
    yield ""
    repeated = _repeated(commands.values())
    shared = [each for each in commands["pin"].params if _is_common(each) or _is_shared(each)]
    yield from _options([*repeated.values(), *shared])
    for name, command in commands.items():
        yield from _section(name, command, repeated)


def _section(name: str, command: Any, repeated: Mapping[tuple[str, str], Any]) -> Iterator[str]:
    common = [
        each for each in command.params if _is_common(each) or (each.name, each.help) in repeated
    ]
    own = [each for each in command.params if not _is_shared(each) and each not in common]
    arguments = [each for each in own if is_argument(each)]
    options = [each for each in own if not is_argument(each)]
    yield f"### loadout {name}"
    yield ""
    usage = [*map(usage_of, filter(is_argument, command.params))]
    usage += [f"[{name_of(each)}]" for each in common if not is_argument(each)]
    if usage:  # Otherwise the heading and the table say all of it.
        usage += ["[OPTIONS]"] if options else []
        yield f"`{' '.join([f'loadout {name}', *usage])}`"
        yield ""
    more = f" [More](#{MORE[name]})." if name in MORE else ""
    yield re.sub(r"\s*\n\s*", " ", command.help.strip()) + more
    yield ""
    if name in {"store", "serve"}:
        yield "It takes the flags in [configuration](configuration.md)."
        yield ""
    elif arguments or options:
        yield from _options([*arguments, *options])
    if command.epilog:
        lines = command.epilog.replace("\b", "").replace("Examples:", "").splitlines()
        examples = [line.strip() for line in lines if line.strip() not in ("", f"loadout {name}")]
        if examples:
            yield from ("```text", *examples, "```", "")


def _overview(commands: Iterable[str]) -> Iterator[str]:
    """Yields links to the commands' sections, by group."""
    links: list[str] = []
    for name in commands:
        if name in GROUPS:
            links.append(f"- **{GROUPS[name]}**: ")
        elif links:
            links[-1] += ", "
        links[-1] += f"[`{name}`](#loadout-{name})"
    yield from links
    yield ""


def _options(parameters: list[Any]) -> Iterator[str]:
    for each in parameters:
        if each.name == "help":
            continue
        environment = f" (`{each.envvar}`)" if getattr(each, "envvar", None) else ""
        meaning = (each.help or "").replace("<", "\\<")
        default = f" Default: `{default_of(each)}`." if default_of(each) else ""
        yield f"- `{name_of(each)}`{environment}: {meaning}{default}"
    yield ""


def _json_output() -> Iterator[str]:
    yield "## JSON output"
    yield ""
    yield "The keys are the fields of the Python client's types. Sizes are bytes, durations"
    yield "seconds, times ISO 8601 in UTC. The tables show lists in brackets and objects in braces;"
    yield "fields before a colon have the type after it. If a service did not answer, you get an"
    yield "Error, `{error: str, code: str, reason: str}`, in its place."
    yield ""
    yield "| command | output |"
    yield "|---|---|"
    for command, output in OUTPUTS.items():
        yield f"| `{command}` | {output} |"
    yield ""
    yield "| type | fields |"
    yield "|---|---|"
    for kind in TYPES:
        hints = typing.get_type_hints(kind)
        fields = [(field.name, _type_name(hints[field.name])) for field in dataclasses.fields(kind)]
        if kind is types.Adapter:
            fields.insert(0, ("ref", "str"))
        groups = [
            f"{', '.join(f'`{name}`' for name, _ in group)}: {hint}"
            for hint, group in itertools.groupby(fields, key=operator.itemgetter(1))
        ]
        yield f"| {kind.__name__} | {'; '.join(groups)} |"
    yield ""


def _type_name(hint: Any) -> str:
    arguments = [each for each in typing.get_args(hint) if each is not type(...)]
    origin = typing.get_origin(hint)
    if origin is tuple:
        return f"[{_type_name(arguments[0])}]"
    if origin is not None and origin.__name__ in {"dict", "Mapping"}:
        return f"{{str: {_type_name(arguments[1])}}}"
    if arguments:
        return " or ".join(map(_type_name, arguments))
    if hint is type(None):
        return "null"
    if isinstance(hint, str):  # of a Literal
        return f'"{hint}"'
    if isinstance(hint, type) and hasattr(hint, "__members__"):
        return " or ".join(f'"{each.value}"' for each in hint)  # type: ignore[attr-defined]
    return {"datetime": "str", "LoadoutError": "Error"}.get(hint.__name__, hint.__name__)


if __name__ == "__main__":
    PATH.write_text(render())
