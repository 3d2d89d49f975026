"""The dashboard of the adapter store: availability, registrations, pulls, and free space."""

from __future__ import annotations

from tools.dashboards import limits, links
from tools.dashboards.board import Board, Row
from tools.dashboards.boards import store_images
from tools.dashboards.boards.places import places
from tools.dashboards.panels import Panel, Query, lines, number, percentiles
from tools.dashboards.queries import REPLICA, STORE, WHICH

_STREAMS = "PullAdapter|ExportAdapter|WatchAdapters|UploadAdapter"
_FAILED = "instance:loadout_store_errors:ratio_rate5m"


def build() -> Board:
    return Board(
        links.STORE,
        "Calls, registrations, compiled images, pulls and the tiers of the adapter store.",
        services=[STORE],
        rows=[
            Row("Now", _now()),
            Row("Calls", _calls()),
            Row("Errors", _errors()),
            Row("Registrations", _registrations()),
            Row("Pulls", store_images.pulls()),
            Row("Images", store_images.images()),
            Row("Tiers", store_images.tiers()),
            Row("Places that tenants share", places(STORE)),
            Row("Catalog and disk", store_images.catalog()),
            Row("Replicas", store_images.replicas()),
        ],
    )


def _now() -> list[Panel]:
    return [*_work(), *_trouble()]


def _work() -> list[Panel]:
    return [
        number(
            "Replicas down",
            "Replicas that Prometheus cannot scrape. No targets: none was known for a week.",
            "short",
            STORE.down,
            limit=limits.ANY,
            missing="no targets",
        ),
        number(
            "Calls",
            "Per second; streams count when they end.",
            "reqps",
            STORE.rate("requests_total"),
        ),
        number(
            "Pulls in progress",
            "Images that are being sent or wait for it.",
            "short",
            STORE.sum("active_pulls"),
            links=[links.TO_LOADS],
        ),
        number(
            "Wait of pulls, p99",
            "From the call to the first bytes: lookup, compile, a free worker, space in memory.",
            "s",
            STORE.quantile(0.99, "pull_wait_seconds"),
            links=[links.TO_LOADS],
        ),
    ]


def _trouble() -> list[Panel]:
    return [
        number(
            "Failed calls",
            "Of the worst replica, within five minutes, because of the store.",
            "percentunit",
            f"max({STORE.series(_FAILED)})",
            limit=limits.FAILED_STORE_CALLS,
        ),
        number(
            "Waiting for space",
            "Images that wait for space. If it lasts: memory is full of images that are "
            "pinned or being sent.",
            "short",
            STORE.sum("images_waiting_for_room"),
        ),
        number(
            "Failed compiles",
            "In the chosen time; images that are incompatible with the base model do not count.",
            "short",
            STORE.growth("compiles_total", where='result="failed"', window="$__range"),
            limit=limits.ANY,
        ),
        number(
            "Damaged files",
            "In the chosen time: stored files that failed their hash. The disk is failing, or "
            "somebody writes to it.",
            "short",
            STORE.growth("damaged_files_total", window="$__range"),
            limit=limits.ANY,
        ),
    ]


def _calls() -> list[Panel]:
    return [
        lines(
            "Calls",
            "By method; streams count when they end.",
            "reqps",
            Query(STORE.rate("requests_total", "method"), "{{method}}"),
            span=6,
            is_stacked=True,
        ),
        _durations("Calls, p50", 0.5),
        _durations("Calls, p99", 0.99),
        lines(
            "Calls by replica",
            "A replica without calls is not used: see Healthy replicas on Adapters and caches.",
            "reqps",
            Query(STORE.rate("requests_total", REPLICA), WHICH),
            span=6,
        ),
    ]


def _errors() -> list[Panel]:
    return [
        lines(
            "Failed calls",
            "Share that failed because of the store (INTERNAL, UNKNOWN, UNAVAILABLE, "
            "DATA_LOSS), within five minutes.",
            "percentunit",
            Query(STORE.series(_FAILED), WHICH),
            limit=limits.FAILED_STORE_CALLS,
        ),
        lines(
            "Calls that failed",
            "By method and status code. NOT_FOUND and INVALID_ARGUMENT are errors of callers; "
            "INTERNAL and DATA_LOSS are not.",
            "reqps",
            Query(
                STORE.or_zero(STORE.rate("requests_total", "method, code", 'code!="OK"')),
                "{{method}} {{code}}",
            ),
            is_stacked=True,
        ),
        lines(
            "Rejections",
            "Calls that were refused or failed, by the error's reason.",
            "reqps",
            Query(STORE.or_zero(STORE.rate("rejections_total", "reason")), "{{reason}}"),
            is_stacked=True,
        ),
    ]


def _registrations() -> list[Panel]:
    return [
        lines(
            "Registrations",
            "Registrations and uploads, by result: ok, or the error's reason.",
            "cps",
            Query(STORE.rate("registrations_total", "result"), "{{result}}"),
            is_stacked=True,
        ),
        percentiles(
            STORE,
            "Registration",
            "From the call to the durable record; most of it is fetching.",
            "registration_seconds",
        ),
        lines(
            "Bytes fetched",
            "From sources and uploads.",
            "binBps",
            Query(STORE.rate("fetched_bytes_total", REPLICA), WHICH),
            is_stacked=True,
        ),
    ]


def _durations(title: str, q: float) -> Panel:
    """Shows the calls' durations, without streams, which last as long as a client listens."""
    expression = STORE.quantile(q, "request_seconds", "method", f'method!~"{_STREAMS}"')
    query = Query(expression, "{{method}}")
    return lines(title, "By method, without streams.", "s", query, span=6)
