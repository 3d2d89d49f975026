"""`loadout check`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.filesize import decimal

from contract.base_model_names import may_mean, names_local_path
from contract.folders import shown
from contract.images.segment_kinds import KIND_LABELS, SegmentKind
from loadout.cli import options
from loadout.cli.adapters.engines import ENGINES, Engine, notes_on
from loadout.cli.adapters.tokenizer import describe_tokenizer
from loadout.cli.local.service_code import run_service_code
from loadout.cli.output import (
    CommandFailed,
    new_table,
    number_ranges,
    print_json,
    split_layer,
    table_console,
)
from loadout.errors import InvalidArgument
from loadout.upload import open_folder

EXAMPLES = """\b
Examples:
  loadout check ./out/french
  loadout check ./out/french --model ./Qwen3-0.6B
  loadout check ./out/french --model Qwen/Qwen3-0.6B --max-rank 16 --lora-targets q_proj,v_proj
  loadout check ./out/french --engine vllm
"""

Report = Mapping[str, Any]
"""See adapter_store.images.plan.check.Report."""

_NOTHING: Report = {
    **dict.fromkeys(("saved_by", "base_model", "digest"), ""),
    **dict.fromkeys(("tokenizer_digest", "chat_template_digest"), ""),
    **dict.fromkeys(("source_bytes", "rank"), 0),
    **dict.fromkeys(("invocation_tokens", "ignored_config_keys", "features", "modules"), ()),
    "warnings": (),
    "server": None,
}
"""The text about a folder that is no adapter's."""

_MaxRank: TypeAlias = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="--max-rank of that server.")
]
_TensorParallel: TypeAlias = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="--tensor-parallel of that server.")
]
_ExpertParallel: TypeAlias = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="--expert-parallel of that server.")
]
_FullyShardedLoras: TypeAlias = Annotated[
    bool, typer.Option("--fully-sharded-loras", help="That server has --fully-sharded-loras.")
]


def check(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="Folder of the adapter, as the trainer saved it."),
    ],
    model: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="Also check as a server of this base model: a folder, or a name in the Hub's "
            "cache.",
        ),
    ] = "",
    max_rank: _MaxRank = None,
    lora_targets: Annotated[
        str, typer.Option(metavar="NAMES", help="--lora-targets of that server.")
    ] = "",
    tensor_parallel: _TensorParallel = None,
    expert_parallel: _ExpertParallel = None,
    fully_sharded_loras: _FullyShardedLoras = False,
    allow_config_keys: Annotated[
        str, typer.Option(metavar="KEYS", help="--allow-config-keys of the store.")
    ] = "",
    engine: Annotated[
        Engine | None,
        typer.Option(
            metavar="|".join(Engine), help="Also list what this engine would ignore or refuse."
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Check an adapter's folder without any service.

    Lists the modules that the adapter changes, with ranks and sizes, and everything that would be
    refused, with reasons. Runs the same checks as a store at registration and, with --model, as a
    server of that model. Fails if one of them refuses the adapter. You can check a folder that you
    do not trust.
    """
    flags = {
        "--max-rank": max_rank,
        "--lora-targets": lora_targets,
        "--tensor-parallel": tensor_parallel,
        "--expert-parallel": expert_parallel,
        "--fully-sharded-loras": fully_sharded_loras,
    }
    given = {flag: str(value) for flag, value in flags.items() if value}
    if given and not model:
        raise typer.BadParameter("needs --model", param_hint=next(iter(given)))
    report = _check(folder, [f"--allow-config-keys={allow_config_keys}"], model, given)
    if as_json:
        print_json({**report, "engine": None if engine is None else _engine_json(report, engine)})
    else:
        _print(report, folder, model, tensor_parallel or 1)
        if engine is not None:
            _print_engine(report, engine)
    _raise_refusal(report)


def _check(folder: Path, flags: list[str], model: str, of_server: Mapping[str, str]) -> Report:
    try:
        open_folder(folder)
    except InvalidArgument as error:
        refusal = {"subject": str(folder), "reason": "", "message": str(error)}
        return {**_NOTHING, "refusal": refusal}
    arguments = ["check", str(folder), *flags]
    if not model:
        return dict(json.loads(run_service_code("adapter_store", *arguments)))
    given = [word for flag in of_server.items() for word in flag]
    given.append("--no-tokenizer")  # it may have none
    server = run_service_code("inference_svc", "layout", "--model", model, *given)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(server)
        file.flush()
        return dict(
            json.loads(run_service_code("adapter_store", *arguments, "--server", file.name))
        )


def _print(report: Report, folder: Path, model: str, num_ranks: int) -> None:
    if report["refusal"]:
        return
    base = report["base_model"] or "a base model that it does not name"
    typer.echo(f"{shown(folder)}: saved as {report['saved_by']} does, for {base}")
    typer.echo(f"{report['digest']}, rank {report['rank']}, {decimal(report['source_bytes'])}")
    if report["ignored_config_keys"]:
        keys = ", ".join(report["ignored_config_keys"])
        typer.echo(f"unknown config keys, allowed: {keys}")
    for warning in report["warnings"]:
        typer.echo(f"warning: {warning}", err=True)
    server = report["server"]
    targets = server["targets"] if server and server["targets"] else report["modules"]
    typer.echo()
    _print_modules(targets)
    if note := describe_tokenizer(folder, Path(model) if model else None, report["base_model"]):
        typer.echo(note, err=True)
    typer.echo()
    if not server:
        typer.echo("a store would register it; give --model MODEL to check it for a server")
        return
    in_config = report["base_model"]
    if not (names_local_path(in_config) or may_mean(in_config, [server["base_model"]])):
        typer.echo(
            f"note: its base model is {report['base_model']}; for servers of another name, "
            "register it with `loadout register --base-model NAME`"
        )
    where = f"a server of {model}, ranks up to {server['max_rank']}"
    if server["refusals"]:
        for refusal in server["refusals"]:
            typer.echo(f"refused by {where}: {_text(refusal)}")
        return
    if copies := _copies(report):
        typer.echo(f"left out, because equal to the base model's: {', '.join(copies)}")
    much = "all of it"
    if unused := server["unused"]:
        much = "the rest of it"
        typer.echo(
            "not used, because no request passes through them: "
            f"{', '.join(_without_layers(unused))}"
        )
    size = f"image of {decimal(server['image_bytes'])}"
    if num_ranks > 1:
        size += f" for each of {num_ranks} processes"
    typer.echo(f"applied by {where}, {much}; {size}")
    if server["note"]:
        typer.echo(f"note: {server['note']}")


def _without_layers(modules: Iterable[str]) -> list[str]:
    """Returns the names once each that modules of all layers have, such as "layers.*.mlp"."""
    parts = map(split_layer, modules)
    names = (after if layer is None else f"{before}*.{after}" for before, layer, after in parts)
    return list(dict.fromkeys(names))


def _copies(report: Report) -> list[str]:
    """Returns the weights of the base that an adapter has whole, and its image has not."""
    targets = {
        target["name"] for target in report["server"]["targets"] if "full" in target["kinds"]
    }
    whole = (module["name"] for module in report["modules"] if "full" in module["kinds"])
    return [name for name in whole if name not in targets.union(report["server"]["unused"])]


def _print_modules(modules: list[Mapping[str, Any]]) -> None:
    """Prints a line for modules that differ in their layer alone."""
    lines: dict[tuple[str, str, int], list[tuple[int | None, int]]] = {}
    for each in modules:
        [name], layer = _without_layers([each["name"]]), split_layer(each["name"])[1]
        has = ", ".join(filter(None, (KIND_LABELS[SegmentKind(kind)] for kind in each["kinds"])))
        lines.setdefault((name, has, each["rank"]), []).append((layer, each["num_bytes"]))
    table = new_table("module", "layers", "has", "rank", "size", right=("rank", "size"))
    for (name, has, rank), found in lines.items():
        layers = number_ranges(sorted(layer for layer, _ in found if layer is not None))
        size = decimal(sum(num_bytes for _, num_bytes in found))
        table.add_row(name, layers, has, str(rank) if rank else "", size)
    table_console().print(table)


def _print_engine(report: Report, engine: Engine) -> None:
    """Prints the facts about an adapter that is not refused."""
    if report["refusal"]:
        return
    notes = notes_on(report["features"], engine)
    typer.echo()
    if not notes:
        typer.echo(f"{ENGINES[engine]}: no part is known to be ignored or refused")
    for note in notes:
        line = f"{note.feature}: {ENGINES[engine]} {note.does.value}: {note.what} ({note.where})"
        typer.echo(line)


def _engine_json(report: Report, engine: Engine) -> dict[str, Any]:
    notes = notes_on(report["features"], engine)
    return {
        "name": ENGINES[engine],
        "notes": [
            {
                "feature": each.feature,
                "does": each.does.value,
                "what": each.what,
                "source": each.where,
            }
            for each in notes
        ],
    }


def _raise_refusal(report: Report) -> None:
    """Raises CommandFailed for an adapter that a store or the server refuses."""
    if report["refusal"]:
        raise CommandFailed(_text(report["refusal"]))
    server = report["server"]
    if server and server["refusals"]:
        raise CommandFailed("a store would register it, but the server would refuse it")


def _text(refusal: Mapping[str, str]) -> str:
    return refusal["message"] + (f" ({refusal['reason']})" if refusal["reason"] else "")
