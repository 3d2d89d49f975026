"""The lines of `loadout register` and `loadout adapters` about the servers that could serve an
adapter."""

from __future__ import annotations

import time
from collections import Counter

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
    same are one. Of an earlier store a line for every image."""
    states = adapter.layout_states
    if _is_of_earlier_store(adapter):
        lines = [
            f"{_where(state)}: image {state.state.value}, {SERVERS_NOT_SAID}" for state in states
        ]
    else:
        lines = [_line(state, server) for state in states for server in state.servers]
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
    counts = Counter(_summary(state, server) for state in states for server in state.servers)
    words = (text if count == 1 else f"{count} {text}" for text, count in counts.items())
    return ", ".join(words) or "no server"


def check_servable(adapter: Adapter) -> None:
    """Raises CommandFailed unless a server can serve the adapter."""
    if _is_of_earlier_store(adapter):
        raise CommandFailed(f"{adapter.ref} is registered, but {SERVERS_NOT_SAID}")
    states = [state for state in adapter.layout_states if state.servers]
    settled = [state for state in states if not _is_open(state)]
    if any(server.servable for state in settled for server in state.servers):
        return
    if len(settled) < len(states):
        why = f"it is not known after {REQUIRED_WAIT_S:.0f} seconds whether a server can serve it"
    elif states:
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


def _line(state: LayoutState, server: ServerVerdict) -> str:
    where = _where(state)
    if server.max_rank:
        where += f", ranks up to {server.max_rank}"
    if not server.servable:
        return f"{NOT_SERVABLE} by {where}: {server.reason}"
    if state.unused_spaces:
        spaces = ", ".join(state.unused_spaces)
        where += f", except its changes in {spaces}, which no request passes through"
    line = f"{SERVABLE} by {where}"
    if _is_open(state):
        line += f", {AS_FAR_AS_KNOWN}: its image is {state.state.value}"
    elif state.state is not ImageState.READY:
        line += "; its image is compiled when it is first used"
    return f"{line}; note: {server.note}" if server.note else line


def _where(state: LayoutState) -> str:
    return f"layout {state.layout_id.removeprefix('sha256:')[:12]}"


def _summary(state: LayoutState, server: ServerVerdict) -> str:
    if not server.servable:
        return f"{NOT_SERVABLE}: {server.reason}"
    return f"{SERVABLE}, {AS_FAR_AS_KNOWN}" if _is_open(state) else SERVABLE
