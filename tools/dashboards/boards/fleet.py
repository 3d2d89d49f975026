"""The fleet overview: availability, speed, failures, and the parts of the time."""

from __future__ import annotations

from tools.dashboards import limits, links
from tools.dashboards.board import Board, Row
from tools.dashboards.boards import adapters_tiers, fleet_engine, fleet_ranks
from tools.dashboards.boards.places import places
from tools.dashboards.panels import Panel, Query, distribution, lines, number, percentiles
from tools.dashboards.queries import INFERENCE, REPLICA, STORE, WHICH

_FAILED = "instance:loadout_inference_generate_errors:ratio_rate5m"


def build() -> Board:
    return Board(
        links.FLEET,
        "Requests, latency, steps and memory of all replicas. Start here.",
        services=[INFERENCE, STORE],
        rows=[
            Row("Now", _now()),
            Row("Traffic", [*_traffic(), *_pooled()]),
            Row("Errors", _errors()),
            Row("Latency", _latency()),
            Row("Queue", fleet_engine.queue()),
            Row("Steps", fleet_engine.steps()),
            Row("Pages", fleet_engine.pages()),
            Row("Recurrent states", fleet_engine.states()),
            Row("Images of prompts", fleet_engine.images()),
            Row("Ranks of --tensor-parallel", fleet_ranks.panels()),
            Row("Memory", fleet_engine.memory()),
            Row("Places that tenants share", places(INFERENCE)),
            Row("Replicas", fleet_engine.replicas()),
        ],
    )


def _now() -> list[Panel]:
    return [
        *_down(),
        number(
            "Requests",
            "Generations that end, per second, however they ended.",
            "reqps",
            INFERENCE.rate("requests_total"),
        ),
        number(
            "Tokens",
            "Tokens that the engines sample per second.",
            "si:tok/s",
            INFERENCE.rate("sampled_tokens_total"),
        ),
        number(
            "First token, p99",
            "From a request's arrival. High: see Queue, and Loads on Adapters and caches.",
            "s",
            INFERENCE.quantile(0.99, "first_token_seconds"),
        ),
        number(
            "Waiting",
            "Requests in the queues of all replicas.",
            "short",
            INFERENCE.sum("requests_waiting"),
            span=2,
        ),
        number(
            "Failed generations",
            "Share at the worst replica within five minutes. See Errors.",
            "percentunit",
            f"max({INFERENCE.series(_FAILED)})",
            limit=limits.FAILED_GENERATIONS,
        ),
        number(
            "Found on the device",
            "Share of requests for an adapter that find it resident. Low: they do not all fit.",
            "percentunit",
            adapters_tiers.found_on_device(),
            links=[links.TO_CACHES],
        ),
        number(
            "Pages in use",
            "Share of the KV cache pages that requests hold. At 100 % requests wait and "
            "are preempted.",
            "percentunit",
            f"{INFERENCE.sum('kv_pages_used')} / {INFERENCE.sum('kv_pages_capacity')}",
        ),
    ]


def _down() -> list[Panel]:
    return [
        number(
            "Replicas down",
            "Inference services that Prometheus cannot scrape. See Replicas below for which. No "
            "targets: none was known for a week.",
            "short",
            INFERENCE.down,
            span=2,
            limit=limits.ANY,
            missing="no targets",
        ),
        number(
            "Stores down",
            "Replicas of the adapter store that Prometheus cannot scrape. No targets: none was "
            "known for a week.",
            "short",
            STORE.down,
            span=2,
            limit=limits.ANY,
            missing="no targets",
            links=[links.TO_STORE],
        ),
    ]


def _traffic() -> list[Panel]:
    return [
        lines(
            "Requests that ended",
            "Generations by how they ended. cancelled: the client disconnected; aborted: its "
            "deadline passed; error: see Calls that failed.",
            "reqps",
            Query(INFERENCE.rate("requests_total", "finish_reason"), "{{finish_reason}}"),
            is_stacked=True,
        ),
        lines(
            "Tokens",
            "sampled: made by the engines. generated: sent to callers. prompt less cached"
            " prompt: computed.",
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
            Query(INFERENCE.rate("sampled_tokens_total", REPLICA), WHICH),
            links=[links.TO_REPLICA],
        ),
        lines(
            "Calls over gRPC",
            "By method; streams count when they end.",
            "reqps",
            Query(INFERENCE.rate("rpcs_total", "method"), "{{method}}"),
            is_stacked=True,
        ),
        lines(
            "Requests over HTTP",
            "By route and status; 499: the client disconnected first.",
            "reqps",
            Query(INFERENCE.rate("http_requests_total", "route, status"), "{{route}} {{status}}"),
            is_stacked=True,
        ),
        lines(
            "Calls of tools",
            "In answers of chats with tools. invalid: the model wrote arguments that are no JSON "
            "object.",
            "cps",
            Query(INFERENCE.rate("tool_calls_total", "arguments"), "{{arguments}}"),
            is_stacked=True,
        ),
    ]


def _pooled() -> list[Panel]:
    return [
        lines(
            "Inputs that were pooled",
            "Inputs of calls that embed, score and classify, by kind and by how they ended.",
            "reqps",
            Query(
                INFERENCE.rate("pooled_requests_total", "kind, finish_reason"),
                "{{kind}} {{finish_reason}}",
            ),
            is_stacked=True,
        ),
        percentiles(
            INFERENCE,
            "Pooled inputs",
            "From the arrival of an input to embed, score or classify until its result was there.",
            "pooled_request_seconds",
            span=16,
        ),
    ]


def _errors() -> list[Panel]:
    return [
        lines(
            "Failed generations",
            "Share that failed because of the service (INTERNAL, UNKNOWN, UNAVAILABLE, "
            "DATA_LOSS, 5xx), within five minutes. One replica: drain it; all: the store or a bug.",
            "percentunit",
            Query(INFERENCE.series(_FAILED), WHICH),
            limit=limits.FAILED_GENERATIONS,
            links=[links.TO_REPLICA],
        ),
        lines(
            "Calls that failed",
            "gRPC calls that did not end OK, by status code. RESOURCE_EXHAUSTED: the queue was "
            "full; UNAVAILABLE: an adapter did not come in time, the server drains, or its engine "
            "has ended.",
            "reqps",
            Query(
                INFERENCE.or_zero(INFERENCE.rate("rpcs_total", "code", 'code!="OK"')), "{{code}}"
            ),
            is_stacked=True,
        ),
        lines(
            "Rejections",
            "Calls that were refused or failed over gRPC and HTTP, by the error's reason.",
            "reqps",
            Query(INFERENCE.or_zero(INFERENCE.rate("rejections_total", "reason")), "{{reason}}"),
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
            "From a request's arrival to its last token. Depends on the tokens requested.",
            "request_seconds",
        ),
        percentiles(
            INFERENCE,
            "Queue time",
            "From a request's arrival until it first ran. High with free pages: the token budget "
            "or max-sequences is the limit; high without: pages are.",
            "queue_seconds",
        ),
        percentiles(
            INFERENCE,
            "Adapter wait",
            "The part of the queue time until the adapter was resident. Adapters and "
            "caches shows the slow part of a load.",
            "adapter_wait_seconds",
        ),
        distribution(
            "First tokens",
            "All requests by the time to their first token. Two bands: requests that find"
            " their adapter, and requests that wait for a load.",
            "s",
            INFERENCE.buckets("first_token_seconds"),
        ),
    ]
