"""`loadout generate`: streams a generation to the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from loadout._rpc.convert.to_chat import Prompt
from loadout.cli import options
from loadout.cli.connection import Connection, connects
from loadout.cli.local.completion import adapter_names
from loadout.types import ChatMessage, Chunk, FinishReason, SamplingParams, Structure

EXAMPLES = """\b
Examples:
  loadout generate "The capital of France is"
  loadout generate --adapter upper --temperature 0 hello=
  loadout generate --adapter "tone*0.5" --adapter support "Where is my parcel?"
  loadout generate --adapter acme/support@3 --chat --max-tokens 200 "Where is my parcel?"
  loadout generate --choice yes --choice no "Is Bern in Switzerland?"
"""


AdapterRefs = Annotated[
    list[str] | None,
    typer.Option(
        metavar="REF[*SCALE]",
        help="Adapter: [tenant/]name[@version] or sha256:<hex>. Repeat it up to 8 times to "
        "add adapters, each multiplied by its scale. Default: the base model.",
        autocompletion=adapter_names,
    ),
]
Chat = Annotated[
    bool, typer.Option("--chat", help="Send TEXT as a user's message through the chat template.")
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Maximum number of tokens to generate, within the model's context. Default: 256.",
    ),
]
Temperature = Annotated[
    float | None, typer.Option(metavar="NUMBER", min=0, help="Sampling temperature; 0 is greedy.")
]
TopP = Annotated[
    float | None,
    typer.Option(metavar="NUMBER", min=0, max=1, help="Probability mass to sample from."),
]
Seed = Annotated[
    int | None,
    typer.Option(metavar="N", min=0, help="Seed for sampling. The same seed gives the same text."),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="Text that ends the generation. You can repeat this option."),
]
JsonSchema = Annotated[
    str | None,
    typer.Option(
        metavar="SCHEMA|FILE",
        help="Generate JSON of this JSON schema: its text, which begins with {, or a file.",
    ),
]
Regex = Annotated[
    str | None,
    typer.Option(metavar="PATTERN", help="Generate a text that this regular expression matches."),
]
Choice = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT", help="Generate one of these texts. Repeat this option for each of them."
    ),
]
Grammar = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="Generate a text of the grammar in this file, in Lark or EBNF (GBNF).",
    ),
]
MinRevision = Annotated[
    int,
    typer.Option(
        metavar="N", min=0, help="Minimum catalog revision to use, as printed by `register`."
    ),
]
Stats = Annotated[bool, typer.Option("--stats", help="Print usage and timings to stderr.")]
Timeout = Annotated[
    float | None, typer.Option(min=0, metavar="SECONDS", help="Timeout of the request.")
]


@connects
def generate(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The prompt.")],
    adapter: AdapterRefs = None,
    chat: Chat = False,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Stop = None,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    choice: Choice = None,
    grammar: Grammar = None,
    min_revision: MinRevision = 0,
    stats: Stats = False,
    timeout: Timeout = None,
    inference: options.Inference = options.DEFAULT_INFERENCE,
    *,
    connection: Connection,
) -> None:
    """Generate text and print it as it arrives."""
    sampling = _sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop=stop,
        structure=_structure(json_schema, regex, choice, grammar),
    )
    prompt: Prompt = [ChatMessage(role="user", content=text)] if chat else text
    parts = [_part(each) for each in adapter or ()]
    alone = parts[0][0] if len(parts) == 1 and parts[0][1] == 1.0 else ""
    with connection.client(inference=inference) as client:
        stream = client.generate(
            prompt,
            adapter=alone,
            adapters=() if alone else parts,
            min_revision=min_revision,
            timeout_s=timeout,
            **sampling,
        )
        last = None
        for last in stream:
            typer.echo(last.text, nl=False)
    typer.echo()
    if last is not None and last.finish_reason is FinishReason.LENGTH and last.usage:
        _explain_length(last.usage.completion_tokens, max_tokens)
    if stats and last is not None:
        typer.echo(_stats(last), err=True)


def _sampling(**options: Any) -> SamplingParams:
    """Returns the options that are given."""
    given = {name: value for name, value in options.items() if value is not None}
    return cast(SamplingParams, given)


def _structure(
    json_schema: str | None, regex: str | None, choice: list[str] | None, grammar: Path | None
) -> Structure | None:
    given: dict[str, Any] = {}
    if json_schema is not None:
        is_text = json_schema.lstrip().startswith("{")
        file = Path(json_schema)
        given["json_schema"] = json_schema if is_text else _read(file, "--json-schema")
    if regex is not None:
        given["regex"] = regex
    if choice:
        given["choice"] = choice
    if grammar is not None:
        given["grammar"] = _read(grammar, "--grammar")
    if len(given) > 1:
        first, second, *_ = (f"--{name.replace('_', '-')}" for name in given)
        raise typer.BadParameter(f"not together with {first}", param_hint=second)
    return cast(Structure, given) if given else None


def _read(file: Path, option: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot read {file}: {error}", param_hint=option) from None


def _part(text: str) -> tuple[str, float]:
    """Returns the reference and the scale of REF[*SCALE]."""
    ref, times, scale = text.partition("*")
    try:
        return ref, float(scale) if times else 1.0
    except ValueError:
        raise typer.BadParameter(
            f"{scale!r} is no number; write a scale as {ref}*0.5", param_hint="--adapter"
        ) from None


def _explain_length(num_tokens: int, max_tokens: int | None) -> None:
    """Says on stderr why a text is cut off where the caller asked for no such limit."""
    if max_tokens is None:
        why = f"{num_tokens} tokens; --max-tokens asks for more, as far as the context goes"
    elif num_tokens < max_tokens:
        why = f"{num_tokens} tokens, the end of the model's context"
    else:
        return
    typer.echo(f"loadout: the text was cut off after {why}", err=True)


def _stats(last: Chunk) -> str:
    parts = [last.adapter.name if last.adapter else "base model"]
    if last.finish_reason:
        parts.append(f"ended by {last.finish_reason.value}")
    if last.usage:
        cached = (
            f" ({last.usage.cached_prompt_tokens} cached)"
            if last.usage.cached_prompt_tokens
            else ""
        )
        parts.append(f"{last.usage.prompt_tokens} prompt tokens{cached}")
        parts.append(f"{last.usage.completion_tokens} generated")
    if last.timings:
        parts.append(f"first token after {last.timings.first_token_seconds * 1000:.0f} ms")
    return ", ".join(parts)
