"""The demo's requests: held-out words for the base and every adapter, mixed, many at once."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from loadout.aio import AsyncClient
from loadout.demo.jobs import JOBS, Job, expected, held_out, prompt

SEED = 11
MAX_ANSWER_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Task:
    """One request: `job` is to transform `word`."""

    job: Job
    word: str


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a task; `first_token_s` counts from sending, at the client."""

    task: Task
    text: str
    first_token_s: float

    @property
    def is_exact(self) -> bool:
        return self.text == expected(self.task.job, self.task.word)


def plan(num_requests: int, seed: int = SEED) -> list[Task]:
    """Returns `num_requests` tasks, as evenly over the jobs as possible, in mixed order."""
    share, rest = divmod(num_requests, len(JOBS))
    tasks = [
        Task(job, word)
        for index, job in enumerate(JOBS)
        for word in held_out(job, share + (index < rest), seed)
    ]
    random.Random(seed).shuffle(tasks)
    return tasks


async def send_all(
    address: str,
    tasks: list[Task],
    revisions: Mapping[str, int],
    num_in_flight: int,
    done: Callable[[Answer], None],
) -> list[Answer]:
    """Streams all tasks greedily, `num_in_flight` at a time. Raises the first LoadoutError."""
    gate = asyncio.Semaphore(num_in_flight)

    async def send(client: AsyncClient, task: Task) -> Answer:
        async with gate:
            answer = await _send(client, task, revisions.get(task.job.name, 0))
        done(answer)
        return answer

    try:
        async with AsyncClient(inference=address) as client, asyncio.TaskGroup() as group:
            running = [group.create_task(send(client, task)) for task in tasks]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [each.result() for each in running]


async def _send(client: AsyncClient, task: Task, revision: int) -> Answer:
    sent_s = time.monotonic()
    first_token_s = 0.0
    text = ""
    stream = client.generate(
        prompt(task.word),
        adapter=task.job.name if task.job.adapter else "",
        min_revision=revision,
        temperature=0,
        max_tokens=MAX_ANSWER_TOKENS,
    )
    async for chunk in stream:
        if chunk.token_ids and not first_token_s:
            first_token_s = time.monotonic() - sent_s
        text += chunk.text
    return Answer(task, text, first_token_s)
