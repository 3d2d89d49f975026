"""A scheduler alone, every adapter resident: who starts when."""

from __future__ import annotations

from dataclasses import dataclass, field

from inference_svc.core import AdapterKey, Batch, Request, SampledToken, SamplingParams, Sequence
from inference_svc.engine.policy.scheduler import Limits, Scheduler
from inference_svc.engine.policy.settle import Settler
from inference_svc.engine.policy.states.pages import Pages
from inference_svc.engine.policy.states.states import States

NEVER_S = 1e9


class AllResident:
    """Every adapter is there."""

    def add_waiter(self, key: AdapterKey, now_s: float, count: bool = True) -> None: ...
    def remove_waiter(self, key: AdapterKey, *, expired: bool = False) -> None: ...
    def ensure_loading(self, key: AdapterKey, now_s: float) -> None: ...
    def is_schedulable(self, key: AdapterKey) -> bool:
        return True

    def acquire(self, key: AdapterKey) -> int:
        return 0

    def release(self, key: AdapterKey) -> None: ...
    def pop_ready(self) -> list[AdapterKey]:
        return []

    def pop_changes(self) -> tuple[()]:
        return ()


@dataclass
class Server:
    """A scheduler whose steps sample token 7, and what it started, in order. Unless it
    `gives_up_places` what runs does so until it ends."""

    quantum: int = 100
    ageing_s: float = NEVER_S
    num_places: int = 2
    gives_up_places: bool = False
    now_s: float = 0.0
    started: list[Request] = field(default_factory=list)
    scheduler: Scheduler = field(init=False)
    num_made: int = 0

    def __post_init__(self) -> None:
        limits = Limits(self.num_places, 64, 64, self.quantum, self.ageing_s)
        self.scheduler = Scheduler(limits, States(Pages(400, 4)), AllResident())
        if not self.gives_up_places:
            self.scheduler.places.wait_s = NEVER_S
        self.settler = Settler(self.scheduler, frozenset(), max_model_len=1000)

    def submit(
        self,
        tenant: str = "",
        key: AdapterKey = "",
        num_prompt: int = 4,
        max_tokens: int = 4,
        **more,
    ) -> Sequence:
        self.num_made += 1
        name = f"{self.num_made}"
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        prompt = tuple(range(num_prompt))
        arrival_s = more.pop("arrival_s", self.now_s)
        request = Request(
            name, prompt, sampling, key, name, tenant=tenant, arrival_s=arrival_s, **more
        )
        sequence = Sequence(request)
        self.scheduler.add(sequence, self.now_s)
        return sequence

    def step(self) -> Batch | None:
        before = {id(s) for s in self.scheduler.running}
        batch = self.scheduler.schedule(self.now_s)
        new = [s for s in self.scheduler.running if id(s) not in before]
        self.started += [s.request for s in sorted(new, key=lambda s: s.started_s or 0.0)]
        if batch is not None:
            sampled = [SampledToken(7) for row in batch.rows if row.samples]
            self.settler.settle(batch, sampled, self.now_s)
        return batch

    def run(self) -> list[Request]:
        """Until nothing is left; the requests in the order in which they started."""
        while self.step() is not None:
            pass
        assert not len(self.scheduler.queue)
        return self.started
