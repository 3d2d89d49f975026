"""An engine without a model."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from contract.images.targets import Target, TargetKind
from inference_svc.adapters.layout import ModelLayout
from inference_svc.api.server_facts import ServerFacts
from inference_svc.app import sampling_defaults
from inference_svc.core import FinishReason, Request, digests_of
from inference_svc.engine.control.status_types import EngineStatus, ResidentAdapter
from inference_svc.engine.transport.messages import (
    Call,
    Cancel,
    Command,
    LayoutAccepted,
    Message,
    Output,
    Reply,
    StepOutputs,
    Stop,
    Submit,
    Timings,
    Usage,
)
from inference_svc.errors import AdapterNotFound, EngineFailed
from inference_svc.results.base import ResultPart
from inference_svc.results.logprobs import LogprobsOption, TokenLogprobs
from servicekit.errors import Draining
from tests.support.models.tokenizers import EOS


@dataclass(eq=False)
class FakeEngine:
    """An engine whose model repeats the prompt: one token per request and step, then EOS.

    It uses the real one's messages, in a thread of its own. `hold` stops its steps, and loads
    (messages are still taken); while it is `stuck` it takes none; `errors` maps a digest to what
    its requests end with; `fail` lets it die. The next requests get the `answers`, if there are
    some.
    """

    errors: dict[str, Exception] = field(default_factory=dict)
    step_s: float = 0.0005
    hold: threading.Event = field(default_factory=threading.Event)
    stuck: threading.Event = field(default_factory=threading.Event)
    fail: threading.Event = field(default_factory=threading.Event)
    cancelled: list[str] = field(default_factory=list)
    submitted: list[Request] = field(default_factory=list)
    layout_ids: list[str] = field(default_factory=list)
    resident: dict[str, ResidentAdapter] = field(default_factory=dict)
    answers: list[tuple[int, ...]] = field(default_factory=list)
    num_resets: int = 0
    num_dumps: int = 0

    def __post_init__(self) -> None:
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._running: dict[str, tuple[Request, int]] = {}
        self._answers: dict[str, tuple[int, ...]] = {}
        self._loads: list[Call] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def other_layouts(self) -> tuple[ModelLayout, ...]:
        return ()

    @property
    def layout(self) -> ModelLayout:
        target = Target(
            "model.layers.0.self_attn.q_proj", 0, "layers.0.qkv", TargetKind.LINEAR, 8, 4
        )
        embedding = Target("model.embed_tokens", None, "embed", TargetKind.EMBEDDING, 400, 8)
        return ModelLayout("base", "0" * 64, torch.bfloat16, (1,), (embedding, target))

    @property
    def num_loading(self) -> int:
        return len(self._loads)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def start(self, on_outputs: Callable[[StepOutputs], None]) -> None:
        self._on_outputs = on_outputs
        self._thread.start()

    def send(self, message: Message) -> None:
        self._inbox.put(message)

    def stop(self, timeout_s: float = 0.0) -> None:
        """Ends the thread, even if a test has failed while it was stuck."""
        self.stuck.clear()
        if self._thread.is_alive():
            self.send(Stop())
            self._thread.join()

    def dump_stacks(self) -> None:
        self.num_dumps += 1

    def _serve(self) -> None:
        stopping = False
        while not stopping:
            outputs: list[Output] = []
            replies: list[Reply] = []
            while not self._inbox.empty() and not self.stuck.is_set():
                message = self._inbox.get()
                stopping |= isinstance(message, Stop)
                self._take(message, outputs, replies)
            if self.fail.is_set():
                self._on_outputs(StepOutputs(failure=EngineFailed("the engine failed")))
                return
            if not self.hold.is_set():
                replies += map(self._answer, self._loads)
                self._loads.clear()
                outputs += [self._step(request_id) for request_id in list(self._running)]
            if stopping:
                error = Draining("stopped")
                outputs += [Output(request_id, error=error) for request_id in self._running]
            if outputs or replies:
                self._on_outputs(StepOutputs(tuple(outputs), tuple(replies)))
            time.sleep(self.step_s)

    def _take(self, message: Message, outputs: list[Output], replies: list[Reply]) -> None:
        if isinstance(message, Submit):
            request = message.request
            self.submitted.append(request)
            if request.key in self.errors:
                outputs.append(Output(request.request_id, error=self.errors[request.key]))
            else:
                self._running[request.request_id] = (request, 0)
                if self.answers:
                    self._answers[request.request_id] = self.answers.pop(0)
        elif isinstance(message, Cancel):
            self.cancelled.append(message.request_id)
            if message.request_id in self._running:
                outputs.append(self._end(message.request_id, FinishReason.ABORTED))
        elif isinstance(message, LayoutAccepted):
            self.layout_ids.append(message.layout_id)
        elif isinstance(message, Call) and message.command is Command.LOAD:
            self._loads.append(message)
        elif isinstance(message, Call):
            replies.append(self._answer(message))

    def _step(self, request_id: str) -> Output:
        request, count = self._running[request_id]
        sampling = request.sampling
        prompt = self._answers.get(request_id, request.prompt_token_ids)
        is_over = count == len(prompt) and not sampling.ignore_eos
        token = EOS if is_over else prompt[count % len(prompt)]
        self._running[request_id] = (request, count + 1)
        parts: tuple[ResultPart, ...] = ()
        option = request.wanted.get(LogprobsOption)
        if option is not None:
            ids, values = [token] * option.top_k, [-0.5] * option.top_k
            parts = (TokenLogprobs.of(token, -0.5, ids, values),)
        if is_over:
            return self._end(request_id, FinishReason.STOP, token, parts)
        if count + 1 >= sampling.max_tokens:
            return self._end(request_id, FinishReason.LENGTH, token, parts)
        return Output(request_id, (token,), parts)

    def _end(
        self,
        request_id: str,
        reason: FinishReason,
        token: int | None = None,
        parts: tuple[ResultPart, ...] = (),
    ) -> Output:
        request, count = self._running.pop(request_id)
        return Output(
            request_id,
            () if token is None else (token,),
            parts,
            finish_reason=reason,
            usage=Usage(len(request.prompt_token_ids), 2, count),
            timings=Timings(0.25, 0.125, 0.5),
        )

    def _answer(self, call: Call) -> Reply:
        if call.command is Command.DESCRIBE:
            running = tuple(
                {digest for r, _ in self._running.values() for digest in digests_of(r.key)}
            )
            memory = {"weights": (5, 5), "kv_pages": (10, 40), "arena": (1, 2)}
            counters = {"pulls": 2.0, "sampled_tokens": 3.0}
            status = EngineStatus(len(self._running), 7, (), running, memory, counters, 1000)
            return Reply(call.call_id, status)
        if call.command is Command.RESET_PREFIX_CACHE:
            self.num_resets += 1
            return Reply(call.call_id)
        if call.command is Command.LIST_RESIDENT:
            return Reply(call.call_id, tuple(self.resident.values())[: call.limit or None])
        if call.command is Command.LOAD:
            if call.digest in self.errors:
                return Reply(call.call_id, error=self.errors[call.digest])
            adapter = ResidentAdapter(call.digest, "device", 640, 8, call.pin, 0, 1000.5, 0.25)
            self.resident[call.digest] = adapter
        if call.digest not in self.resident:
            error = AdapterNotFound(f"adapter {call.digest} is not resident", subject="ref")
            return Reply(call.call_id, error=error)
        if call.command is Command.UNLOAD:
            return Reply(call.call_id, self.resident.pop(call.digest).num_bytes)
        return Reply(call.call_id, self.resident[call.digest])


def facts_of(config: Any, tokenizer: Any) -> ServerFacts:
    """Returns the facts of the fake engine."""
    return ServerFacts(
        base_model="base",
        architecture="FakeForCausalLM",
        dtype=config.dtype,
        kv_dtype=config.dtype,
        device=config.device,
        vocab_size=tokenizer.vocab_size,
        max_model_len=config.max_model_len,
        max_loras=4,
        max_lora_rank=16,
        max_sequences=8,
        max_batch_tokens=64,
        max_queue=16,
        versions={"loadout": "0"},
        aliases=("b",),
        sampling=sampling_defaults(config, tokenizer.vocab_size),
    )
