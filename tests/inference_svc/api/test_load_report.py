"""The published load."""

from __future__ import annotations

from typing import Any

from grpc_health.v1 import health_pb2

from inference_svc.api.load_report import LOAD_HEADER, load_report
from inference_svc.auto_settings import CPU_SEQUENCES
from loadout._routing import metadata
from loadout._routing.metadata import Load, read_load
from loadout.inference.v1 import inference_pb2 as pb
from tests.support.inference.serving import Running, error_of
from tests.support.wait import until_async


def test_clients_parse_the_report() -> None:
    assert LOAD_HEADER == metadata.LOAD_HEADER
    report = load_report(num_requests=80, max_sequences=64, max_queue=1024)
    assert read_load([(LOAD_HEADER, report)]) == Load(80, 64)


def test_utilization_exceeds_one_when_requests_wait() -> None:
    assert load_report(16, 64, 0).startswith("TEXT application_utilization=0.2500,")
    assert load_report(80, 64, 0).startswith("TEXT application_utilization=1.2500,")


def test_every_response_has_the_load(serve) -> None:
    async def load_of(call: Any) -> Load | None:
        return read_load(tuple(await call.trailing_metadata()))

    async def body(running: Running) -> None:
        limit = CPU_SEQUENCES
        running.engine.hold.set()
        held = running.stub.Generate(pb.GenerateRequest(text="held"))
        await until_async(lambda: running.engine.num_running == 1)

        check = running.health.Check(health_pb2.HealthCheckRequest())
        await check
        assert await load_of(check) == Load(1, limit)
        refused = await error_of(running.generate(adapter="gone"))
        assert read_load(tuple(refused.trailing_metadata())) == Load(1, limit)

        running.engine.hold.clear()
        assert [response async for response in held]
        assert await load_of(held) == Load(0, limit)

    serve(body, store=True)
