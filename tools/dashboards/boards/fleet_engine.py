"""Panels of the fleet overview: the engines' time and memory, and the replicas."""

from __future__ import annotations

from tools.dashboards import limits, links
from tools.dashboards.links import Link
from tools.dashboards.panels import Column, Panel, Query, lines, percentiles, rows_by
from tools.dashboards.queries import INFERENCE, REPLICA, SAME_TARGET, STORE, WHERE, WHICH

_FIRING = f'{WHERE},alertname=~"Loadout.*",alertstate="firing"'
_ABOUT, _BUILT_OF = ("base_model", "dtype", "device"), ("version", "python", "torch")


def queue() -> list[Panel]:
    return [
        lines(
            "Running",
            "Requests in the batch of each replica; at most max-sequences.",
            "short",
            Query(INFERENCE.sum("requests_running", REPLICA), WHICH),
            links=[links.TO_REPLICA],
        ),
        lines(
            "Waiting",
            "Requests in the queue of each replica. Growing: more requests arrive than finish, "
            "and autoscaling should react.",
            "short",
            Query(INFERENCE.sum("requests_waiting", REPLICA), WHICH),
            limit=limits.QUEUE,
            links=[links.TO_REPLICA],
        ),
        lines(
            "Waiting for an adapter",
            "Waiting requests whose adapter is not resident. If these are nearly all: loads are "
            "the limit, not the model.",
            "short",
            Query(INFERENCE.sum("requests_waiting_for_adapter", REPLICA), WHICH),
            links=[links.TO_REPLICA],
        ),
    ]


def steps() -> list[Panel]:
    return [
        percentiles(
            INFERENCE,
            "Step",
            "One step of the engine, from reading its messages to sending its outputs.",
            "step_seconds",
            span=6,
        ),
        lines(
            "Parts of a step",
            "Mean time of each part. On CUDA forward launches kernels, and sample waits for "
            "them. The other phases are overhead.",
            "s",
            Query(INFERENCE.mean("step_phase_seconds", "phase"), "{{phase}}"),
            span=6,
            is_stacked=True,
        ),
        lines(
            "Step overhead",
            "Mean time of a step outside the model's computation, and mean time that it spends on "
            "loading adapters. The second should stay near zero.",
            "s",
            Query(INFERENCE.mean("step_host_seconds"), "host"),
            Query(INFERENCE.mean("step_blocked_by_load_seconds"), "blocked by loads"),
            span=6,
        ),
        lines(
            "Kinds of steps",
            "Share of steps whose batch used an adapter; the others are for the base model "
            "alone. On GPUs also the share of steps of sizes that were not recorded before, which "
            "take the host longer.",
            "percentunit",
            *(
                Query(
                    f"{INFERENCE.rate(f'{kind}_steps_total', REPLICA)} / "
                    f"{INFERENCE.rate('step_seconds_count', REPLICA)}",
                    f"{words}, {WHICH}",
                )
                for kind, words in (("lora", "with adapters"), ("eager", "not recorded"))
            ),
            span=6,
            maximum=1,
            links=[links.TO_REPLICA],
        ),
    ]


def pages() -> list[Panel]:
    return [
        lines(
            "Pages",
            "KV cache pages. known: pages that a prefix can match; used at capacity means that "
            "requests wait for pages.",
            "short",
            Query(INFERENCE.sum("kv_pages_used"), "used"),
            Query(INFERENCE.sum("kv_pages_known"), "known"),
            Query(INFERENCE.sum("kv_pages_capacity"), "capacity"),
        ),
        lines(
            "Preemptions by generation",
            "How often a generation was put back into the queue because pages ran out, within five "
            "minutes. Wasted work: give pages more memory, or run fewer sequences.",
            "percentunit",
            Query(
                INFERENCE.series("instance:loadout_inference_preemptions:ratio_rate5m"),
                WHICH,
            ),
            limit=limits.PREEMPTIONS,
            links=[links.TO_REPLICA],
        ),
        lines(
            "Page evictions",
            "Preemptions, and cached pages evicted for others: their prefixes must be computed "
            "again when they are used again.",
            "cps",
            Query(INFERENCE.rate("preemptions_total"), "preemptions"),
            Query(INFERENCE.rate("kv_page_evictions_total"), "page evictions"),
        ),
        lines(
            "Moves to newer versions",
            "Requests that continued with a newer version of their adapter, as their "
            "callers chose.",
            "cps",
            Query(INFERENCE.rate("version_moves_total"), "moves"),
            span=12,
        ),
        lines(
            "Replicas that do not generate",
            "Paused, or asleep: their memory is freed until they are woken.",
            "short",
            Query(INFERENCE.sum("generation_paused"), "paused"),
            Query(INFERENCE.sum("asleep"), "asleep"),
            span=12,
        ),
    ]


def states() -> list[Panel]:
    return [
        lines(
            "Recurrent states",
            "used: of running requests; stored: states that a prefix can match. Other models than "
            "those with recurrent layers have none.",
            "short",
            Query(INFERENCE.sum("recurrent_states_used"), "used"),
            Query(INFERENCE.sum("recurrent_states_stored"), "stored"),
            Query(INFERENCE.sum("recurrent_states_capacity"), "capacity"),
        ),
        lines(
            "Tokens recomputed without a state",
            "Tokens that were computed although their pages were known, because no recurrent state "
            "was stored at their end. Many: raise --stored-states or lower "
            "--state-interval-tokens.",
            "cps",
            Query(INFERENCE.rate("recurrent_recomputed_tokens_total"), "recomputed"),
        ),
        lines(
            "State evictions",
            "Stored recurrent states evicted for others: their prefixes must be computed again "
            "when they are used again.",
            "cps",
            Query(INFERENCE.rate("recurrent_state_evictions_total"), "evictions"),
        ),
    ]


_IMAGE_PLACES = 'place=~"prompt_image.*"'


def images() -> list[Panel]:
    used, capacity = (
        INFERENCE.series(name, _IMAGE_PLACES) for name in ("place_used", "place_capacity")
    )
    return [
        lines(
            "Images",
            "Images of prompts whose embeddings were computed, were there from an earlier request, "
            "or were dropped for others. Few found in conversations: give --prompt-image-memory "
            "more. Fetches of URLs, by their outcome: not_allowed are hosts not in --image-hosts.",
            "cps",
            Query(INFERENCE.rate("prompt_image_encodes_total"), "computed"),
            Query(INFERENCE.rate("prompt_image_hits_total"), "found"),
            Query(INFERENCE.rate("prompt_image_evictions_total"), "dropped"),
            Query(INFERENCE.rate("prompt_image_fetches_total", "outcome"), "fetch: {{outcome}}"),
            span=6,
        ),
        lines(
            "Embeddings of images",
            "Half of --prompt-image-memory. used: of running requests; stored: also those that "
            "later requests may find. used near capacity means that requests with images wait.",
            "bytes",
            *(
                Query(INFERENCE.sum(f"prompt_image_embedding_{name}_bytes"), name)
                for name in ("used", "stored", "capacity")
            ),
            span=6,
        ),
        lines(
            "Pixels, decoders and uploads",
            "Share in use in the fullest replica: prompt_image_bytes are the pixels of open "
            "requests, prompt_images processes that decode files, prompt_image_fetches fetches, "
            "prompt_image_uploads uploaded files, which stay until others need the room.",
            "percentunit",
            Query(f"max by (place) ({used} / {capacity})", "{{place}}"),
            span=6,
            maximum=1,
        ),
        lines(
            "Images that wait or are refused",
            "Requests that wait for pixels' memory, files that wait to be fetched or decoded, and "
            "refusals per second, also of uploads.",
            "short",
            Query(INFERENCE.sum("place_waiting", "place", _IMAGE_PLACES), "{{place}} waiting"),
            Query(
                INFERENCE.rate("place_refusals_total", "place", _IMAGE_PLACES), "{{place}} refused"
            ),
            span=6,
        ),
    ]


def memory() -> list[Panel]:
    used, capacity = INFERENCE.sum("memory_used_bytes", "area"), "memory_capacity_bytes"
    return [
        lines(
            "Memory in use",
            "By area, in all replicas: weights, pages, the arena, workspace, the rest of the "
            "processes.",
            "bytes",
            Query(used, "{{area}}"),
            is_stacked=True,
        ),
        lines(
            "Share of memory in use",
            "By area. 100 % is not necessarily a problem: caches are meant to be full.",
            "percentunit",
            Query(f"{used} / ({INFERENCE.sum(capacity, 'area')} > 0)", "{{area}}"),
            maximum=1,
        ),
        lines(
            "Resident memory",
            "Of the server processes. A process that only grows will be killed when "
            "memory runs out.",
            "bytes",
            Query(INFERENCE.series("process_resident_memory_bytes"), WHICH),
            links=[links.TO_REPLICA],
        ),
        *_out_of_memory(),
        lines(
            "CPU",
            "Cores in use by the server processes.",
            "short",
            Query(INFERENCE.rate("process_cpu_seconds_total", REPLICA), WHICH),
            links=[links.TO_REPLICA],
        ),
        *_failures(),
    ]


def _out_of_memory() -> list[Panel]:
    return [
        lines(
            "Steps out of memory",
            "Number of steps within five minutes that ran out of the device's memory and were "
            "computed in parts. The usual cause is another program on the device.",
            "short",
            Query(INFERENCE.growth("step_out_of_memory_total", REPLICA), WHICH),
            limit=limits.ANY,
            links=[links.TO_REPLICA],
        ),
        lines(
            "Tokens computed at once",
            "Limit by replica: fewer than max-batch-tokens after steps ran out of memory.",
            "short",
            Query(INFERENCE.sum("step_token_limit", REPLICA), WHICH),
            links=[links.TO_REPLICA],
        ),
    ]


def _failures() -> list[Panel]:
    return [
        lines(
            "Requests that could not be computed",
            "Within five minutes. Not finite: the weights of their adapters are too large. Faults "
            "are bugs.",
            "short",
            Query(INFERENCE.growth("not_finite_requests_total", REPLICA), f"not finite, {WHICH}"),
            Query(INFERENCE.growth("faulty_requests_total", REPLICA), f"faults, {WHICH}"),
            span=12,
            limit=limits.ANY,
            links=[links.TO_REPLICA],
        ),
        lines(
            "Device faults",
            "Faults that ended engines or their starts. A server shows its fault for half"
            " a minute before it exits.",
            "short",
            Query(
                INFERENCE.sum("device_faults_total", f"{REPLICA}, kind"), f"{{{{kind}}}}, {WHICH}"
            ),
            span=12,
            limit=limits.ANY,
            links=[links.TO_REPLICA],
        ),
    ]


def replicas() -> list[Panel]:
    return [
        _table(),
        lines(
            "Scraped",
            "1 while Prometheus can scrape a replica. A gap is a crash, a network problem, or a "
            "replica that was removed by scaling.",
            "short",
            Query(INFERENCE.up, f"{{{{job}}}} {WHICH}"),
            Query(STORE.up, f"{{{{job}}}} {WHICH}"),
            maximum=1,
        ),
        lines(
            "Age of the engine's report",
            "Time since the engine of a replica last reported. Grows while the engine hangs: the "
            "replica answers Prometheus, but no requests.",
            "s",
            Query(INFERENCE.series("snapshot_age_seconds"), WHICH),
            limit=limits.ENGINE_SILENT,
            links=[links.TO_REPLICA],
        ),
        lines(
            "Firing alerts",
            "By name. docs/operations/runbook.md has a section on each.",
            "short",
            Query(
                INFERENCE.or_zero(f"count by (alertname) (ALERTS{{{_FIRING}}})"),
                "{{alertname}}",
            ),
            is_stacked=True,
        ),
    ]


def _table() -> Panel:
    return rows_by(
        "Inference replicas",
        "Versions and settings by replica. Several versions: an upgrade is in progress, or "
        "stuck. No version: the replica does not answer.",
        ["instance", "namespace", "cluster", *_ABOUT, *_BUILT_OF],
        [
            Column("Up", f"sum by ({REPLICA}) ({INFERENCE.up})", "short"),
            Column("Uptime", _running_seconds(), "s"),
            Column("Running", INFERENCE.sum("requests_running", REPLICA), "short"),
            Column("Waiting", INFERENCE.sum("requests_waiting", REPLICA), "short"),
            Column("Store", INFERENCE.sum("store_connected", REPLICA), "short"),
            Column(
                "Open files",
                f"{INFERENCE.sum('process_open_fds', REPLICA)} / "
                f"{INFERENCE.sum('process_max_fds', REPLICA)}",
                "percentunit",
            ),
        ],
        link=Link(
            "Adapters of this replica",
            links.ADAPTERS,
            {"inference_instance": "${__data.fields.instance}"},
        ),
    )


def _running_seconds() -> str:
    """Returns the uptime by replica, with its configuration and versions as labels."""
    about, built_of = ", ".join(_ABOUT), ", ".join(_BUILT_OF)
    seconds = f"(time() - {INFERENCE.series('process_start_time_seconds')})"
    return (
        f"sum by ({REPLICA}, {about}, {built_of}) ({seconds} "
        f"* {SAME_TARGET} group_left ({about}) {INFERENCE.series('info')} "
        f"* {SAME_TARGET} group_left ({built_of}) {INFERENCE.series('build_info')})"
    )
