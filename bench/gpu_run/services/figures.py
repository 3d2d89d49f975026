"""Makes figures of rounds of streams, and a table of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import NamedTuple

from bench.gpu_run.context import Found
from bench.results import median, percentile


@dataclass(frozen=True)
class Round:
    """Streams that start at once, and share `adapters`. Cold ones are only in the store."""

    streams: int
    adapters: int
    prompt_tokens: int
    new_tokens: int
    is_cold: bool = False


class Message(NamedTuple):
    """Tokens that arrived together, and the seconds since their stream's start."""

    arrival_s: float
    num_tokens: int


Stream = tuple[Message, ...]
"""A stream's messages that have tokens."""


class Streams(NamedTuple):
    """All streams of a round, and its seconds."""

    seconds: float
    streams: tuple[Stream, ...]


def row_of(wanted: Round, found: Streams, earlier: Sequence[Found]) -> Found:
    """Returns a round's figures. `share_of_base` is relative to the round of as many streams
    without adapters among the earlier rows, if there is one."""
    firsts = [stream[0].arrival_s for stream in found.streams]
    gaps = [gap for stream in found.streams for gap in gaps_of(stream)]
    rate = wanted.streams * wanted.new_tokens / found.seconds
    of_base = (wanted.streams, wanted.prompt_tokens, 0)
    base = next(
        (
            row["tokens_per_s"]
            for row in earlier
            if (row["streams"], row["prompt_tokens"], row["adapters"]) == of_base
        ),
        None,
    )
    return {
        **asdict(wanted),
        "tokens_per_s": rate,
        "share_of_base": None if base is None else rate / base,
        "first_token_ms": 1e3 * median(firsts),
        "between_tokens_p50_ms": 1e3 * percentile(gaps, 50),
        "between_tokens_p99_ms": 1e3 * percentile(gaps, 99),
    }


def gaps_of(stream: Stream) -> Iterator[float]:
    """Yields the seconds between tokens. Tokens that arrived together share the time since the
    message before; there are none between tokens of the first message."""
    for _ in range(stream[0].num_tokens - 1):
        yield 0.0
    for before, after in pairwise(stream):
        for _ in range(after.num_tokens):
            yield (after.arrival_s - before.arrival_s) / after.num_tokens


def table(found: Found) -> str:
    """Returns the figures as a table of Markdown, after the times of the start."""
    times = {
        "start_s": "start to first token",
        "register_s": "registrations",
        "compiled_s": "until all are compiled",
        "cold_first_token_s": "first token of a cold adapter",
    }
    lines = [f"{text}: {found[key]:.3f} s" for key, text in times.items() if key in found]
    lines += [
        "| streams | tokens in | adapters | tokens/s | of base | first token, median ms "
        "| between tokens, ms (p99) |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found.get("rounds", []):
        share = row["share_of_base"]
        cells = (
            row["streams"],
            row["prompt_tokens"],
            f"{row['adapters'] or 'base'}{', cold' if row['is_cold'] else ''}",
            f"{row['tokens_per_s']:,.0f}",
            "" if share is None else f"{share:.2f}",
            f"{row['first_token_ms']:.0f}",
            f"{row['between_tokens_p50_ms']:.1f} ({row['between_tokens_p99_ms']:.1f})",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)
