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
            "Requests in the queue of each replica. Grows: more arrives than is done, and "
            "autoscaling should react.",
            "short",
            Query(INFERENCE.sum("requests_waiting", REPLICA), WHICH),
            limit=limits.QUEUE,
            links=[links.TO_REPLICA],
        ),
        lines(
            "Waiting for an adapter",
            "Of the waiting, those whose adapter is not resident. Near all of them: loads are the "
            "limit, not the model.",
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
            "One turn of the engine, from its messages to its outputs.",
            "step_seconds",
            span=6,
        ),
        lines(
            "Parts of a step",
            "Mean time of each part. On CUDA forward only launches, and sample waits for it. What "
            "grows beside forward and sample is our own cost.",
            "s",
            Query(INFERENCE.mean("step_phase_seconds", "phase"), "{{phase}}"),
            span=6,
            is_stacked=True,
        ),
        lines(
            "Beside the model",
            "Mean time of a step that is not the model's computation, and that loads of adapters "
            "cost it. The second should stay near zero.",
            "s",
            Query(INFERENCE.mean("step_host_seconds"), "host"),
            Query(INFERENCE.mean("step_blocked_by_load_seconds"), "blocked by loads"),
            span=6,
        ),
        lines(
            "Steps with adapters",
            "Share of steps in which an adapter took part. The others are the base model's alone.",
            "percentunit",
            Query(
                f"{INFERENCE.rate('lora_steps_total', REPLICA)} / "
                f"{INFERENCE.rate('step_seconds_count', REPLICA)}",
                WHICH,
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
            "Pages of keys and values. known is what a prefix may be found in; used at capacity "
            "means that requests wait for pages.",
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
            "Pages given up",
            "Preemptions, and known pages given up for others: prefixes that must be computed "
            "again when they come.",
            "cps",
            Query(INFERENCE.rate("preemptions_total"), "preemptions"),
            Query(INFERENCE.rate("kv_page_evictions_total"), "page evictions"),
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
            span=6,
            is_stacked=True,
        ),
        lines(
            "Share of memory in use",
            "Of what each area has. An area at 100 % is full, not necessarily in trouble: caches "
            "are meant to be full.",
            "percentunit",
            Query(f"{used} / ({INFERENCE.sum(capacity, 'area')} > 0)", "{{area}}"),
            span=6,
            maximum=1,
        ),
        lines(
            "Resident memory",
            "Of the processes that listen. One that only grows will be killed for it.",
            "bytes",
            Query(INFERENCE.series("process_resident_memory_bytes"), WHICH),
            span=6,
            links=[links.TO_REPLICA],
        ),
        lines(
            "CPU",
            "Cores in use by the processes that listen.",
            "short",
            Query(INFERENCE.rate("process_cpu_seconds_total", REPLICA), WHICH),
            span=6,
            links=[links.TO_REPLICA],
        ),
    ]


def replicas() -> list[Panel]:
    return [
        rows_by(
            "Inference replicas",
            "What runs where. Several versions: an upgrade is under way, or got stuck. Without a "
            "version: it does not answer.",
            ["instance", "namespace", "cluster", *_ABOUT, *_BUILT_OF],
            [
                Column("Up", f"sum by ({REPLICA}) ({INFERENCE.up})", "short"),
                Column("Runs for", _running_seconds(), "s"),
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
        ),
        lines(
            "Scraped",
            "1 while Prometheus reaches a replica. A gap is a crash, a network problem, or a "
            "replica that was scaled away.",
            "short",
            Query(INFERENCE.up, f"{{{{job}}}} {WHICH}"),
            Query(STORE.up, f"{{{{job}}}} {WHICH}"),
            maximum=1,
        ),
        lines(
            "Engine's last word",
            "How long ago the engine of a replica told anything. Grows while it hangs: the replica "
            "answers Prometheus, and nobody else.",
            "s",
            Query(INFERENCE.series("snapshot_age_seconds"), WHICH),
            limit=limits.ENGINE_SILENT,
            links=[links.TO_REPLICA],
        ),
        lines(
            "Alerts that fire",
            "By name. docs/operations/runbook.md has a paragraph on each.",
            "short",
            Query(
                INFERENCE.or_zero(f"count by (alertname) (ALERTS{{{_FIRING}}})"),
                "{{alertname}}",
            ),
            is_stacked=True,
        ),
    ]


def _running_seconds() -> str:
    """By replica, with what it is and what it is built of."""
    about, built_of = ", ".join(_ABOUT), ", ".join(_BUILT_OF)
    seconds = f"(time() - {INFERENCE.series('process_start_time_seconds')})"
    return (
        f"sum by ({REPLICA}, {about}, {built_of}) ({seconds} "
        f"* {SAME_TARGET} group_left ({about}) {INFERENCE.series('info')} "
        f"* {SAME_TARGET} group_left ({built_of}) {INFERENCE.series('build_info')})"
    )
