"""Times a list page, a lookup, a watch and a start of a catalog with many adapters.

    python -m bench.store.catalog [--adapters 100000] [--postgres DSN]

The catalog uses SQLite, and also PostgreSQL if you give an empty database. Times are of the calls
that the RPCs make, in milliseconds; a start is everything before the store serves. JSON goes to
bench/results/store_catalog.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from sqlalchemy import insert, text, update

from adapter_store.catalog.catalog import Catalog
from adapter_store.catalog.database import Place
from adapter_store.catalog.tables import schema
from adapter_store.catalog.watch import Watch
from servicekit.refs import AdapterName, AdapterRef
from servicekit.shares import FairExecutor, Shares

RESULTS = Path(__file__).parents[1] / "results" / "store_catalog.json"
BATCH_ROWS = 5_000
TENANTS = 100
LAYOUT = "sha256:" + "f" * 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--adapters", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--postgres", default="", help="address of an empty database")
    options = parser.parse_args()
    results = {"adapters": options.adapters, "repeats": options.repeats}
    with tempfile.TemporaryDirectory() as folder:
        places: dict[str, Place] = {"sqlite": Path(folder) / "catalog.sqlite3"}
        if options.postgres:
            places["postgresql"] = options.postgres
        for name, place in places.items():
            results[name] = measure(place, options.adapters, options.repeats)
    print(json.dumps(results, indent=2))
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")


def measure(place: Place, num_adapters: int, repeats: int) -> dict[str, Any]:
    catalog = Catalog(place, event_retention=100_000)
    fill(catalog, num_adapters)
    catalog.close()
    start = time.perf_counter()
    catalog = Catalog(place, event_retention=100_000)
    catalog.images.pinned_keys()
    catalog.blobs.digests()
    start_seconds = time.perf_counter() - start
    draw = random.Random(0)

    def name() -> AdapterName:
        return name_of(draw.randrange(num_adapters))

    last = [""]

    def next_page() -> None:
        last[0] = catalog.names.page(100, last[0])[1]

    calls: dict[str, Callable[[], object]] = {
        "list_page": next_page,
        "list_tenant_page": lambda: catalog.names.page(100, "", f"tenant={name().tenant}"),
        "get_by_name": lambda: catalog.names.get(AdapterRef(name())),
        "get_by_digest": lambda: catalog.names.get(
            AdapterRef(digest=digest_of(draw.randrange(num_adapters)))
        ),
        "list_versions": lambda: catalog.names.versions(name()),
    }
    found = {key: milliseconds(call, repeats) for key, call in calls.items()}
    found["watch_start"] = asyncio.run(watch_milliseconds(catalog, repeats))
    catalog.close()
    return {"start_seconds": round(start_seconds, 3), "median_ms": found}


def fill(catalog: Catalog, num_adapters: int) -> None:
    """Inserts the rows that `num_adapters` registrations would leave, without their commits."""
    with catalog.database.migrating() as conn:
        for first in range(0, num_adapters, BATCH_ROWS):
            numbers = range(first, min(first + BATCH_ROWS, num_adapters))
            for table, make in ROWS.items():
                conn.execute(insert(schema.metadata.tables[table]), [make(i) for i in numbers])
        conn.execute(update(schema.history).values(revision=num_adapters))
        conn.execute(text("ANALYZE"))
    catalog.layouts.add(LAYOUT, "org/tiny", "{}")


def digest_of(number: int) -> str:
    return f"sha256:{number:064x}"


def name_of(number: int) -> AdapterName:
    return AdapterName(f"t{number % TENANTS:02}", f"n{number:06}")


ROWS: dict[str, Callable[[int], dict[str, Any]]] = {
    "blobs": lambda i: {
        "digest": digest_of(i),
        "rank": 16,
        "targets": '["k_proj", "o_proj", "q_proj", "v_proj"]',
        "source_bytes": 20_000_000,
        "create_time": 0,
    },
    "adapters": lambda i: {
        "id": i + 1,
        "tenant": name_of(i).tenant,
        "name": name_of(i).name,
        "current_version": 1,
        "last_version": 1,
        "revision": i + 1,
        "update_time": 0,
    },
    "versions": lambda i: {
        "adapter_id": i + 1,
        "version": 1,
        "digest": digest_of(i),
        "base_model": "org/tiny",
        "source_uri": "s3://bucket/prefix",
        "labels": '{"team": "cx"}',
        "pinned": False,
        "create_time": 0,
    },
    "events": lambda i: {
        "revision": i + 1,
        "kind": "registered",
        "name": str(name_of(i)),
        "version": 1,
        "digest": digest_of(i),
        "time": 0,
    },
}


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Returns the median of `repeats` calls."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return round(statistics.median(times) * 1000, 3)


async def watch_milliseconds(catalog: Catalog, repeats: int) -> float:
    """Times a watcher that is a hundred events late, from its call to the first event."""
    times = []
    with closing(FairExecutor(4, "calls")) as calls:
        watch = Watch(catalog.history, calls, 1, Shares("watches", 1 << 20))
        since = catalog.history.revision() - 100
        for _ in range(repeats):
            start = time.perf_counter()
            events = watch.stream(since)
            await anext(events)
            times.append(time.perf_counter() - start)
            await events.aclose()
    return round(statistics.median(times) * 1000, 3)


if __name__ == "__main__":
    main()
