"""The lines of `loadout register` and `loadout adapters` about the servers that could serve an
adapter."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import typer

from loadout.cli.output import CommandFailed
from loadout.client import Client
from loadout.errors import LoadoutError
from loadout.types import Adapter, ImageState, LayoutState, ServerVerdict

WAIT_S = 5.0
"""How long a command waits for images, from which verdicts follow."""
REQUIRED_WAIT_S = 60.0
"""And how long if its exit code depends on them."""
SERVABLE, NOT_SERVABLE, AS_FAR_AS_KNOWN = "servable", "not servable", "as far as is known"
SERVERS_NOT_SAID = "this store, of an earlier release, does not report which servers can serve it"
MIN_DELAY_S, MAX_DELAY_S = 0.05, 1.0

Replicas: TypeAlias = list[tuple[LayoutState, ServerVerdict]]
"""The verdicts on servers that have announced the same: one, or one for each rank."""


def wait_for_verdicts(client: Client, adapter: Adapter, *, is_required: bool) -> Adapter:
    """Returns the adapter once it is known for each server that accepts its rank whether it fits,
    and no image is being compiled; or as it is when the time is over, or the store has no more to
    say: it is registered all the same."""
    deadline = time.monotonic() + (REQUIRED_WAIT_S if is_required else WAIT_S)
    delay_s = MIN_DELAY_S
    while any(map(_is_open, adapter.layout_states)) and time.monotonic() < deadline:
        time.sleep(delay_s)
        delay_s = min(2 * delay_s, MAX_DELAY_S)
        try:
            adapter = client.get(adapter.ref)
        except LoadoutError:
            break
    return adapter


def print_verdicts(adapter: Adapter) -> None:
    """Prints a line for every server of the adapter's base model; servers that have announced the
    same are one, and so are the processes that compute a model together, if their verdicts agree.
    Of an earlier store a line for every image."""
    states = adapter.layout_states
    if _is_of_earlier_store(adapter):
        lines = [
            f"{_where(state)}: image {state.state.value}, {SERVERS_NOT_SAID}" for state in states
        ]
    else:
        lines = [line for replicas in _replicas(states) for line in _lines(replicas)]
    lines = lines or [f"no server serves base model {adapter.base_model}"]
    for line in lines:
        typer.echo(line)


def short_verdicts(adapter: Adapter) -> str:
    """Returns the lines of `print_verdicts` for a column: alike ones once, with the number of the
    servers' announcements that they are about if there are several."""
    states = adapter.layout_states
    if _is_of_earlier_store(adapter):
        images = ", ".join(dict.fromkeys(state.state.value for state in states))
        return f"unknown to this store (images: {images})"
    counts = Counter(_summary(replicas) for replicas in _replicas(states))
    words = (text if count == 1 else f"{count} {text}" for text, count in counts.items())
    return ", ".join(words) or "no server"


def check_servable(adapter: Adapter) -> None:
    """Raises CommandFailed unless a server can serve the adapter."""
    if _is_of_earlier_store(adapter):
        raise CommandFailed(f"{adapter.ref} is registered, but {SERVERS_NOT_SAID}")
    found = _replicas(adapter.layout_states)
    settled = [each for each in found if _is_settled(each)]
    if any(all(server.servable for _, server in each) for each in settled):
        return
    if len(settled) < len(found):
        why = f"it is not known after {REQUIRED_WAIT_S:.0f} seconds whether a server can serve it"
    elif found:
        why = "no server of its base model can serve it"
    else:
        why = f"no server serves base model {adapter.base_model}"
    raise CommandFailed(f"{adapter.ref} is registered, but {why}")


def _is_of_earlier_store(adapter: Adapter) -> bool:
    """Returns whether the store is of 0.2, which says nothing of servers: later ones report that a
    ready image fits."""
    states = adapter.layout_states
    return any(state.state is ImageState.READY and not state.fits for state in states)


def _is_open(state: LayoutState) -> bool:
    """Returns whether it may still turn out that no server of the layout can serve the adapter."""
    is_settled = state.state in (ImageState.READY, ImageState.INCOMPATIBLE) or (
        state.state is ImageState.PENDING and state.fits
    )
    return not is_settled and any(server.servable for server in state.servers)


def _replicas(states: Sequence[LayoutState]) -> list[Replicas]:
    """Returns the verdicts of each announcement: one, or one for each rank, in their order."""
    found: dict[object, Replicas] = {}
    for state in states:
        for server in state.servers:
            first_id = server.first_announcement_id or server.announcement_id
            key = first_id if server.num_ranks > 1 else (state.layout_id, id(server))
            found.setdefault(key, []).append((state, server))
    return [sorted(each, key=lambda verdict: verdict[1].rank_index) for each in found.values()]


def _is_settled(replicas: Replicas) -> bool:
    """Returns whether it is known if the servers can serve the adapter: one rank may decide it."""
    is_refused = any(not server.servable for _, server in replicas)
    return is_refused or (_is_whole(replicas) and not any(_is_open(state) for state, _ in replicas))


def _is_whole(replicas: Replicas) -> bool:
    """Returns whether all ranks of the servers are known."""
    _, server = replicas[0]
    return [each.rank_index for _, each in replicas] == [*range(max(1, server.num_ranks))]


def _lines(replicas: Replicas) -> list[str]:
    """Returns a line for servers whose ranks agree, or for each rank."""
    verdicts = [_verdict(state, server) for state, server in replicas]
    state, server = replicas[0]
    if _is_whole(replicas) and len(set(verdicts)) == 1:
        ranks = f", {server.num_ranks} processes" if server.num_ranks > 1 else ""
        return [_line(verdicts[0], f"{_where(state)}{ranks}", server)]
    places = [
        f"{_where(state)}, rank {server.rank_index} of {server.num_ranks} processes"
        for state, server in replicas
    ]
    return [
        _line(verdict, place, server)
        for verdict, place, (_, server) in zip(verdicts, places, replicas, strict=True)
    ]


class _Verdict(NamedTuple):
    """The parts of a line before and after its place."""

    word: str
    end: str


def _verdict(state: LayoutState, server: ServerVerdict) -> _Verdict:
    if not server.servable:
        return _Verdict(NOT_SERVABLE, f": {server.reason}")
    end = ""
    if state.unused_spaces:
        spaces = ", ".join(state.unused_spaces)
        end = f", except its changes in {spaces}, which no request passes through"
    if _is_open(state):
        end += f", {AS_FAR_AS_KNOWN}: its image is {state.state.value}"
    elif state.state is not ImageState.READY:
        end += "; its image is compiled when it is first used"
    return _Verdict(SERVABLE, f"{end}; note: {server.note}" if server.note else end)


def _line(verdict: _Verdict, place: str, server: ServerVerdict) -> str:
    if server.max_rank:
        place += f", ranks up to {server.max_rank}"
    return f"{verdict.word} by {place}{verdict.end}"


def _where(state: LayoutState) -> str:
    return f"layout {state.layout_id.removeprefix('sha256:')[:12]}"


def _summary(replicas: Replicas) -> str:
    reasons = dict.fromkeys(server.reason for _, server in replicas if not server.servable)
    if reasons:
        return f"{NOT_SERVABLE}: {'; '.join(reasons)}"
    is_open = not _is_whole(replicas) or any(_is_open(state) for state, _ in replicas)
    return f"{SERVABLE}, {AS_FAR_AS_KNOWN}" if is_open else SERVABLE
