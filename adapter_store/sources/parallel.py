"""Several files at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from adapter_store.sources.staging import Abandoned, Staging

FILES_AT_ONCE = 4


def copy_all(names: Iterable[str], copy: Callable[[str], None], staging: Staging) -> None:
    """Calls `copy` with each name, some at a time. The first error ends the others and is raised.

    What still writes to `staging` or waits on it when that happens ends there.
    """
    with ThreadPoolExecutor(FILES_AT_ONCE, "copy") as pool:
        jobs = [pool.submit(copy, name) for name in names]
        wait(jobs, return_when=FIRST_EXCEPTION)
        if any(job.done() and job.exception() is not None for job in jobs):
            staging.abandon()
            pool.shutdown(wait=True, cancel_futures=True)
    errors = [job.exception() for job in jobs if not job.cancelled()]
    for error in errors:
        if error is not None and not isinstance(error, Abandoned):
            raise error
