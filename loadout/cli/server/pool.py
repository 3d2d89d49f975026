"""`loadout embed` and `loadout classify`: vectors and labels of texts."""

from __future__ import annotations

import json
from typing import Annotated, cast

import typer

from loadout.cli import options
from loadout.cli.connection import Connection, connects
from loadout.cli.local.completion import adapter_names
from loadout.cli.output import new_table, print_json, table_console
from loadout.types import Pooling, Truncation

EMBED_EXAMPLES = """\b
Examples:
  loadout embed "Where is the Eiffel Tower?"
  loadout embed --adapter search --dimensions 256 "It stands in Paris." "I like tea."
  loadout embed --prompt-name query "Where is it?" | jq length
"""
CLASSIFY_EXAMPLES = """\b
Examples:
  loadout classify "I love it"
  loadout classify --adapter mood "I love it" "How sad"
  loadout classify --json "I love it" | jq .[0].label
"""
POOLINGS = ("last", "mean", "first", "none")
ENDS = ("end", "start")

Texts = Annotated[list[str], typer.Argument(metavar="TEXT", help="Texts, up to 2,048.")]
Adapter = Annotated[
    str,
    typer.Option(
        metavar="REF",
        help="Adapter: [tenant/]name[@version] or sha256:<hex>. Default: the base model.",
        autocompletion=adapter_names,
    ),
]
Truncate = Annotated[
    str | None,
    typer.Option(
        metavar="END",
        help="Cut texts that are too long: at the end, or at the start. Default: refuse them.",
    ),
]


@connects
def embed(
    texts: Texts,
    adapter: Adapter = "",
    dimensions: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Print only the first numbers.")
    ] = None,
    pooling: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS",
            help="Tokens whose hidden states are averaged: last, mean or first; or none: a vector "
            "of each token. Default: the model's choice.",
        ),
    ] = None,
    prompt_name: Annotated[
        str, typer.Option(metavar="NAME", help="Prompt of the model to put before each text.")
    ] = "",
    truncate: Truncate = None,
    inference: options.Inference = options.DEFAULT_INFERENCE,
    *,
    connection: Connection,
) -> None:
    """Print the vector of each text, as a line of JSON."""
    if pooling is not None and pooling not in POOLINGS:
        raise typer.BadParameter(f"one of {', '.join(POOLINGS)}", param_hint="--pooling")
    with connection.client(inference=inference) as client:
        found = client.embed(
            texts,
            adapter=adapter,
            dimensions=dimensions or 0,
            pooling=cast(Pooling | None, pooling),
            prompt_name=prompt_name,
            truncation=_truncation(truncate),
        )
    for each in found:
        typer.echo(json.dumps(each.vector.tolist()))


@connects
def classify(
    texts: Texts,
    adapter: Adapter = "",
    truncate: Truncate = None,
    as_json: options.Json = False,
    inference: options.Inference = options.DEFAULT_INFERENCE,
    *,
    connection: Connection,
) -> None:
    """Print the most probable label of each text."""
    with connection.client(inference=inference) as client:
        found = client.classify(texts, adapter=adapter, truncation=_truncation(truncate))
    if as_json:
        print_json(
            [
                {
                    "label": each.label,
                    "label_index": each.label_index,
                    "probabilities": each.probabilities.tolist(),
                }
                for each in found
            ]
        )
        return
    table = new_table("text", "label", "probability")
    for text, each in zip(texts, found, strict=True):
        table.add_row(text, each.label, f"{each.probabilities[each.label_index]:.4f}")
    table_console().print(table)


def _truncation(end: str | None) -> Truncation | None:
    if end is not None and end not in ENDS:
        raise typer.BadParameter(f"one of {', '.join(ENDS)}", param_hint="--truncate")
    return cast(Truncation | None, end)
