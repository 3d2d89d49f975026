"""Fleet overview: is it up, how fast is it, what fails, and where does the time go?"""

from __future__ import annotations

from tools.dashboards import limits, links
from tools.dashboards.board import Board, Row
from tools.dashboards.links import Link
from tools.dashboards.panels import (
    Column,
    Panel,
    Query,
    distribution,
    lines,
    number,
    percentiles,
    rows_by,
)
from tools.dashboards.queries import INFERENCE, STORE, Service, or_zero, share

TO_ADAPTERS = Link(
    "Adapters of this replica", links.ADAPTERS, {"inference_instance": "${__field.labels.instance}"}
)
TO_CACHES = Link("Adapters and caches", links.ADAPTERS)
_FIRING = 'alertname=~"Loadout.*",alertstate="firing"'
_ABOUT, _BUILT_OF = ("base_model", "dtype", "device"), ("version", "python", "torch")
_FAILED = "instance:loadout_inference_generate_errors:ratio_rate5m"


def build() -> Board:
    return Board(
        links.FLEET,
        "Requests, latency, steps and memory of all replicas. Start here.",
        services=[INFERENCE, STORE],
        rows=[
            Row("Now", _now()),
            Row("Traffic", _traffic()),
            Row("Errors", _errors()),
            Row("Latency", _latency()),
            Row("Queue", _queue()),
            Row("Steps", _steps()),
            Row("Pages", _pages()),
            Row("Memory", _memory()),
            Row("Replicas", _replicas()),
        ],
    )


def _now() -> list[Panel]:
    return [
        number(
            "Replicas down",
            "Scrape targets of both services that do not answer. See Replicas below for which.",
            "short",
            or_zero(f"count({_up(INFERENCE)} == 0 or {_up(STORE)} == 0)"),
            limit=limits.ANY,
        ),
        number(
            "Requests",
            "Generations that end, per second, however they ended.",
            "reqps",
            INFERENCE.rate("requests_total"),
        ),
        number(
            "Tokens",
            "Tokens that the engines make per second, before they are sent.",
            "si:tok/s",
            INFERENCE.rate("sampled_tokens_total"),
        ),
        number(
            "First token, p99",
            "From a request's arrival. High: see Queue, and the loads of Adapters and caches.",
            "s",
            INFERENCE.quantile(0.99, "first_token_seconds"),
        ),
        number(
            "Waiting",
            "Requests in the queues of all replicas.",
            "short",
            INFERENCE.sum("requests_waiting"),
        ),
        number(
            "Failed generations",
            "Of the worst replica, within five minutes. See Errors.",
            "percentunit",
            f"max({INFERENCE.series(_FAILED)})",
            limit=limits.FAILED_GENERATIONS,
        ),
        number(
            "Found on the device",
            "Share of the requests for an adapter that find it resident. Low: they do not all fit.",
            "percentunit",
            share(
                INFERENCE.rate("tier_hits_total", where='tier="device"'),
                INFERENCE.rate("tier_misses_total", where='tier="device"'),
            ),
            links=[TO_CACHES],
        ),
        number(
            "Pages in use",
            "Share of the pages for keys and values that requests hold. At 100 % requests wait and "
            "are preempted.",
            "percentunit",
            f"{INFERENCE.sum('kv_pages_used')} / {INFERENCE.sum('kv_pages_capacity')}",
        ),
    ]


def _traffic() -> list[Panel]:
    return [
        lines(
            "Requests that ended",
            "Generations by how they ended. cancelled: the caller left; aborted: its deadline "
            "passed; error: see Calls that failed.",
            "reqps",
            Query(INFERENCE.rate("requests_total", "finish_reason"), "{{finish_reason}}"),
            is_stacked=True,
        ),
        lines(
            "Tokens",
            "sampled is what the engines make, generated what callers were sent. prompt less "
            "cached prompt is what had to be computed.",
            "si:tok/s",
            Query(INFERENCE.rate("sampled_tokens_total"), "sampled"),
            Query(INFERENCE.rate("generated_tokens_total"), "generated"),
            Query(INFERENCE.rate("prompt_tokens_total"), "prompt"),
            Query(INFERENCE.rate("cached_prompt_tokens_total"), "cached prompt"),
        ),
        lines(
            "Tokens by replica",
            "A replica far below the others has no traffic (routing) or is slow (see its steps).",
            "si:tok/s",
            Query(INFERENCE.rate("sampled_tokens_total", "instance"), "{{instance}}"),
            links=[TO_ADAPTERS],
        ),
        lines(
            "Calls over gRPC",
            "By method, streams when they end.",
            "reqps",
            Query(INFERENCE.rate("rpcs_total", "method"), "{{method}}"),
            span=12,
            is_stacked=True,
        ),
        lines(
            "Requests over HTTP",
            "Of the HTTP front, by route and status; 499: the client left first.",
            "reqps",
            Query(INFERENCE.rate("http_requests_total", "route, status"), "{{route}} {{status}}"),
            span=12,
            is_stacked=True,
        ),
    ]


def _errors() -> list[Panel]:
    return [
        lines(
            "Failed generations",
            "Share that ended through a fault on our side (INTERNAL, UNKNOWN, UNAVAILABLE, "
            "DATA_LOSS, 5xx), within five minutes. One replica: drain it; all: the store, or us.",
            "percentunit",
            Query(INFERENCE.series(_FAILED), "{{instance}}"),
            limit=limits.FAILED_GENERATIONS,
            links=[TO_ADAPTERS],
        ),
        lines(
            "Calls that failed",
            "gRPC calls that did not end OK, by status code. RESOURCE_EXHAUSTED: the queue was "
            "full; UNAVAILABLE: an adapter did not come in time, or the server drains.",
            "reqps",
            Query(or_zero(INFERENCE.rate("rpcs_total", "code", 'code!="OK"')), "{{code}}"),
            is_stacked=True,
        ),
        lines(
            "Rejections",
            "Calls that were refused or failed over gRPC and HTTP, by the error's reason.",
            "reqps",
            Query(or_zero(INFERENCE.rate("rejections_total", "reason")), "{{reason}}"),
            is_stacked=True,
        ),
    ]


def _latency() -> list[Panel]:
    return [
        percentiles(
            INFERENCE,
            "First token",
            "From a request's arrival to its first token: queue, adapter, prompt.",
            "first_token_seconds",
        ),
        percentiles(
            INFERENCE,
            "Between tokens",
            "Between two tokens of a request. Rises with the batch; jumps when steps are blocked.",
            "inter_token_seconds",
        ),
        percentiles(
            INFERENCE,
            "Whole request",
            "From a request's arrival to its last token. Depends on how much callers ask for.",
            "request_seconds",
        ),
        percentiles(
            INFERENCE,
            "In the queue",
            "From a request's arrival until it first ran. High with free pages: the token budget "
            "or max-sequences is the limit; high without: pages are.",
            "queue_seconds",
        ),
        percentiles(
            INFERENCE,
            "For an adapter",
            "Of the time in the queue, until the adapter was resident. See Adapters and caches "
            "for which part of a load takes long.",
            "adapter_wait_seconds",
        ),
        distribution(
            "First tokens",
            "All requests by the time to their first token. Two bands: those that find their "
            "adapter, and those that wait for a load.",
            "s",
            INFERENCE.buckets("first_token_seconds"),
        ),
    ]


def _queue() -> list[Panel]:
    return [
        lines(
            "Running",
            "Requests in the batch of each replica; at most max-sequences.",
            "short",
            Query(INFERENCE.sum("requests_running", "instance"), "{{instance}}"),
            links=[TO_ADAPTERS],
        ),
        lines(
            "Waiting",
            "Requests in the queue of each replica. Grows: more arrives than is done, and "
            "autoscaling should react.",
            "short",
            Query(INFERENCE.sum("requests_waiting", "instance"), "{{instance}}"),
            limit=limits.QUEUE,
            links=[TO_ADAPTERS],
        ),
        lines(
            "Waiting for an adapter",
            "Of the waiting, those whose adapter is not resident. Near all of them: loads are the "
            "limit, not the model.",
            "short",
            Query(INFERENCE.sum("requests_waiting_for_adapter", "instance"), "{{instance}}"),
            links=[TO_ADAPTERS],
        ),
    ]


def _steps() -> list[Panel]:
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
                f"{INFERENCE.rate('lora_steps_total', 'instance')} / "
                f"{INFERENCE.rate('step_seconds_count', 'instance')}",
                "{{instance}}",
            ),
            span=6,
            maximum=1,
            links=[TO_ADAPTERS],
        ),
    ]


def _pages() -> list[Panel]:
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
                "{{instance}}",
            ),
            limit=limits.PREEMPTIONS,
            links=[TO_ADAPTERS],
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


def _memory() -> list[Panel]:
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
            Query(INFERENCE.series("process_resident_memory_bytes"), "{{instance}}"),
            span=6,
            links=[TO_ADAPTERS],
        ),
        lines(
            "CPU",
            "Cores in use by the processes that listen.",
            "short",
            Query(INFERENCE.rate("process_cpu_seconds_total", "instance"), "{{instance}}"),
            span=6,
            links=[TO_ADAPTERS],
        ),
    ]


def _replicas() -> list[Panel]:
    return [
        rows_by(
            "Inference replicas",
            "What runs where. Several versions: an upgrade is under way, or got stuck. Without a "
            "version: it does not answer.",
            ["instance", *_ABOUT, *_BUILT_OF],
            [
                Column("Up", f"sum by (instance) ({_up(INFERENCE)})", "short"),
                Column("Runs for", _running_seconds(), "s"),
                Column("Running", INFERENCE.sum("requests_running", "instance"), "short"),
                Column("Waiting", INFERENCE.sum("requests_waiting", "instance"), "short"),
                Column("Store", INFERENCE.sum("store_connected", "instance"), "short"),
                Column(
                    "Open files",
                    f"{INFERENCE.sum('process_open_fds', 'instance')} / "
                    f"{INFERENCE.sum('process_max_fds', 'instance')}",
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
            Query(_up(INFERENCE), "{{job}} {{instance}}"),
            Query(_up(STORE), "{{job}} {{instance}}"),
            span=12,
            maximum=1,
        ),
        lines(
            "Alerts that fire",
            "By name. docs/operations.md has a paragraph on each.",
            "short",
            Query(
                or_zero(
                    'count by (alertname) (ALERTS{alertname=~"Loadout.*",alertstate="firing"})'
                ),
                "{{alertname}}",
            ),
            span=12,
            is_stacked=True,
        ),
    ]


def _running_seconds() -> str:
    """By replica, with what it is and what it is built of."""
    about, built_of = ", ".join(_ABOUT), ", ".join(_BUILT_OF)
    seconds = f"(time() - {INFERENCE.series('process_start_time_seconds')})"
    return (
        f"sum by (instance, {about}, {built_of}) ({seconds} "
        f"* on (job, instance) group_left ({about}) {INFERENCE.series('info')} "
        f"* on (job, instance) group_left ({built_of}) {INFERENCE.series('build_info')})"
    )


def _up(service: Service) -> str:
    return f"up{{{service.targets}}}"
