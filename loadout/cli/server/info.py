"""`loadout info`: both services' versions, limits and memory."""

from __future__ import annotations

from collections.abc import Sequence

from rich.filesize import decimal

from loadout.cli import options
from loadout.cli.connection import Connection, connects, only_replica
from loadout.cli.output import CommandFailed, error_text, new_table, print_json, table_console
from loadout.errors import LoadoutError
from loadout.types import (
    EmbeddingInfo,
    Processor,
    RankStatus,
    ServerInfo,
    StoreStatus,
    TierStatus,
)

EXAMPLES = """\b
Examples:
  loadout info
  loadout info --json | jq .server.limits
"""

TIMEOUT_S = 5.0
SHOWN_LABELS = 8


@connects
def info(
    as_json: options.Json = False,
    inference: options.Inference = options.DEFAULT_INFERENCE,
    store: options.Store = options.DEFAULT_STORE,
    *,
    connection: Connection,
) -> None:
    """Show the configuration of one replica and the store.

    Shows model, device, kernels, threads, processor, layout, limits, memory and versions, the
    processes of --tensor-parallel and --pipeline-parallel, and what would make the replica
    faster. Fails if one of the services does not answer.
    """
    server: ServerInfo | LoadoutError
    status: StoreStatus | LoadoutError
    replica = only_replica(inference)
    with connection.client(inference=replica, store=store, timeout_s=TIMEOUT_S) as client:
        try:
            server = client.server_info()
        except LoadoutError as error:
            server = error
        try:
            status = client.store_status()
        except LoadoutError as error:
            status = error
    if as_json:
        print_json({"server": server, "store": status})
    else:
        table = new_table("service", "property", "value")
        for service, rows in (
            ("inference", _server_rows(server)),
            ("store", _store_rows(status)),
        ):
            for name, value in rows:
                table.add_row(service, name, value)
        table_console().print(table)
    for part in (server, status):
        if isinstance(part, LoadoutError):
            raise CommandFailed(error_text(part))


def _server_rows(server: ServerInfo | LoadoutError) -> list[tuple[str, str]]:
    if isinstance(server, LoadoutError):
        return [("error", error_text(server))]
    limits = server.limits
    rows = [
        ("base model", server.base_model),
        ("architecture", server.architecture),
        ("dtype", server.dtype),
        *([("weights", server.weight_form)] if server.weight_form else []),
        *([("keys and values", server.kv_dtype)] if server.kv_dtype else []),
        ("device", _device(server)),
        ("kernels", server.kernels),
        *(("products", f"{each.format}: {each.kernels}") for each in server.weight_formats),
        *([("threads", str(server.num_threads))] if server.num_threads else []),
        *([("processor", _processor(server.processor))] if server.processor else []),
        *(("speed", note) for note in server.speed_notes),
        ("layout", server.layout_id or "not yet accepted by the store"),
        ("tokens per sequence", str(limits.max_model_len)),
        ("adapters", _adapters(server)),
        ("targets", ", ".join(limits.lora_targets) or "all"),
        ("sequences", f"{limits.max_sequences} running, {limits.max_queue} queued"),
        ("tokens per batch", str(limits.max_batch_tokens)),
    ]
    if (defaults := server.sampling_defaults) is not None:
        top_k = defaults.top_k or "off"
        text = f"temperature {defaults.temperature:g}, top_p {defaults.top_p:g}, top_k {top_k}"
        rows.append(("sampling by default", text))
    if (experts := server.experts) is not None:
        text = f"{experts.num_chosen} of {experts.num_experts} in {len(experts.layers)} layers"
        rows.append(("experts", text))
    if (states := server.recurrent_states) is not None:
        text = (
            f"{decimal(states.state_bytes)} each, {states.capacity} fit: {states.used} used, "
            f"{states.stored} of {states.max_stored} stored, one every {states.interval_tokens} "
            "tokens"
        )
        rows.append(("recurrent states", text))
    if server.generates is not None:
        rows.append(("serves", _served(server)))
    if (embedding := server.embedding) is not None:
        rows.append(("vectors", _vectors(embedding)))
    if server.classifier is not None and server.classifier.labels:
        rows.append(("labels", _labels(server.classifier.labels)))
    rows += [(rank_name(each, server.ranks), _rank(each)) for each in server.ranks]
    for use in server.memory:
        text = f"{decimal(use.used_bytes)} of {decimal(use.capacity_bytes)}"
        rows.append((f"memory {use.name}", text))
    rows += [(f"version {name}", version) for name, version in server.versions.items()]
    return rows


def rank_name(rank: RankStatus, ranks: Sequence[RankStatus]) -> str:
    """Returns a rank's name, with its stage if there are several."""
    name = f"rank {rank.index}"
    return f"{name}, stage {rank.stage}" if any(each.stage for each in ranks) else name


def _rank(rank: RankStatus) -> str:
    """Returns a line on one of the processes that compute the model."""
    parts = [
        f"process {rank.process_id}" + ("" if rank.answers else ", which does not answer"),
        f"{decimal(rank.resident_bytes)} resident: weights {decimal(rank.weights_bytes)}, pages "
        f"{decimal(rank.kv_bytes)}, adapters {decimal(rank.arena_bytes)}",
        f"{rank.num_threads} thread{'' if rank.num_threads == 1 else 's'}"
        + (f" on processors {_ranges(rank.processors)}" if rank.processors else ""),
    ]
    if rank.num_steps:
        computing_ms, waiting_ms = (
            1000 * seconds / rank.num_steps
            for seconds in (
                max(0.0, rank.step_seconds - rank.exchange_seconds),
                rank.exchange_seconds,
            )
        )
        steps = f"{computing_ms:.1f} ms computing and {waiting_ms:.1f} ms waiting for others"
        parts.append(f"per step {steps}")
    pulls = f", {rank.running_pulls} pulls in progress" if rank.running_pulls else ""
    parts.append(f"{decimal(rank.pulled_bytes)} pulled{pulls}")
    return "; ".join(parts)


def _ranges(numbers: Sequence[int]) -> str:
    """Returns ascending numbers with runs as ranges, such as "0-3, 8"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _device(server: ServerInfo) -> str:
    """Returns the device, with its name unless the processor's row has that."""
    is_named = server.device == "cpu" and server.processor is not None
    return " ".join(filter(None, (server.device, "" if is_named else server.machine)))


def _processor(processor: Processor) -> str:
    counts = {"core": processor.num_cores, "processor": processor.num_processors}
    parts = [f"{count} {noun}{'s' * (count != 1)}" for noun, count in counts.items()]
    if 0 < processor.quota < processor.num_processors:
        parts.append(f"quota {processor.quota:g}")
    return f"{processor.name}: {', '.join(parts)}"


def _adapters(server: ServerInfo) -> str:
    limits = server.limits
    text = f"{limits.max_loras} of rank {limits.max_lora_rank} or less"
    is_other = server.adapter_dtype not in ("", server.dtype)
    return f"{text}, A and B in {server.adapter_dtype}" if is_other else text


def _served(server: ServerInfo) -> str:
    """Returns the calls that a server answers."""
    kinds = ["generate", "score"] if server.generates else []
    kinds += ["embed"] if server.embedding is not None else []
    if (classifier := server.classifier) is not None:
        kinds.append("classify tokens" if classifier.per_token else "classify")
        kinds += ["score"] if classifier.scores_pairs else []
    return ", ".join(kinds)


def _vectors(info: EmbeddingInfo) -> str:
    """Returns how a server embeds, in words."""
    text = f"{info.size} numbers, {info.pooling} of up to {info.max_tokens} tokens"
    if info.dimensions:
        text += f", also {', '.join(map(str, info.dimensions))}"
    if info.normalized:
        text += ", of length 1"
    if info.prompt_names:
        text += f"; prompts {', '.join(info.prompt_names)}"
    return text


def _labels(labels: Sequence[str]) -> str:
    """Returns the first names of labels, and how many there are."""
    shown, num_others = ", ".join(labels[:SHOWN_LABELS]), len(labels) - SHOWN_LABELS
    return f"{shown} and {num_others} others" if num_others > 0 else shown


def _store_rows(store: StoreStatus | LoadoutError) -> list[tuple[str, str]]:
    if isinstance(store, LoadoutError):
        return [("error", error_text(store))]
    return [
        ("version", store.version),
        ("adapters", str(store.adapters)),
        ("layouts", str(store.layouts)),
        ("revision", str(store.revision)),
        ("blobs", decimal(store.blob_bytes)),
        ("memory images", _tier(store.memory)),
        ("memory locked", "yes" if store.memory_locked else _unlocked(store)),
        ("disk images", _tier(store.disk)),
    ]


def _unlocked(store: StoreStatus) -> str:
    reason = store.memory_unlocked_reason
    return f"no: {reason}" if reason else "no"


def _tier(tier: TierStatus) -> str:
    used = f"{decimal(tier.used_bytes)} of {decimal(tier.capacity_bytes)}"
    return f"{tier.images} images, {used}"
