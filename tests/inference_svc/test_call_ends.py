"""How calls end before they are done: callers that leave, drains, failures."""

import asyncio

import grpc
import pytest

from inference_svc.api.load_report import REFUSED_HEADER
from inference_svc.errors import DeviceFault, EngineFailed
from inference_svc.frontend import watchdog
from inference_svc.server import SERVICE
from loadout._rpc.status import read_details
from loadout.inference.v1 import inference_pb2 as pb
from loadout.inference.v1 import inference_pb2_grpc as pb_grpc
from servicekit.rpc.interceptor import QUIET_SECONDS
from tests.support.inference.serving import NOT_SERVING, SERVING, Running, digest_of, error_of
from tests.support.wait import until_async


def test_cancel_and_deadline_reach_the_engine(serve) -> None:
    async def body(running: Running) -> None:
        running.engine.hold.set()
        call = running.stub.Generate(pb.GenerateRequest(text="abc"))
        await until_async(lambda: running.engine.num_running == 1)
        call.cancel()
        await until_async(lambda: running.engine.num_running == 0)
        error = await error_of(running.generate(timeout=1.0))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        request = running.engine.submitted[-1]
        assert request.deadline_s is not None
        assert 0 < request.deadline_s - request.arrival_s < 10
        await until_async(lambda: running.engine.num_running == 0)
        assert len(running.engine.cancelled) == 2

    serve(body)


def test_a_caller_that_vanishes_frees_its_request(serve) -> None:
    async def body(running: Running) -> None:
        async with grpc.aio.insecure_channel(running.server.address) as channel:
            params = pb.SamplingParams(ignore_eos=True, max_tokens=50)
            call = pb_grpc.InferenceServiceStub(channel).Generate(
                pb.GenerateRequest(text="abc", sampling=params)
            )
            await call.read()
            running.engine.hold.set()
            assert running.engine.num_running == 1
        await until_async(lambda: running.engine.num_running == 0)

    async def slowly(running: Running) -> None:
        running.engine.step_s = 0.01
        await body(running)

    serve(slowly)


def test_an_engine_that_hangs_is_not_serving_until_it_answers(serve, monkeypatch) -> None:
    monkeypatch.setattr(watchdog, "CHECK_SECONDS", 0.01)
    # From the start: a check keeps the limit that it began with.
    monkeypatch.setattr(watchdog, "HANG_SECONDS", 0.1)

    async def becomes(running: Running, status: int) -> None:
        async def is_so() -> bool:
            return {await running.health_of(), await running.health_of(SERVICE)} == {status}

        await until_async(is_so)

    async def body(running: Running) -> None:
        ended = asyncio.create_task(running.server.run(running.stop))
        await becomes(running, SERVING)
        running.engine.stuck.set()
        await becomes(running, NOT_SERVING)
        monkeypatch.setattr(watchdog, "HANG_SECONDS", 30.0)
        assert running.engine.num_dumps == 1, "the log says where it hangs"
        running.engine.stuck.clear()
        await becomes(running, SERVING)
        assert await running.generate()
        running.stop.set()
        await ended

    serve(body)


def test_an_engine_that_hangs_for_too_long_is_given_up(serve, monkeypatch) -> None:
    monkeypatch.setattr(watchdog, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(watchdog, "CONFIRM_SECONDS", 0.1)

    async def body(running: Running) -> None:
        running.engine.hold.set()
        call = asyncio.create_task(running.generate())
        await until_async(lambda: running.engine.num_running == 1)
        running.engine.stuck.set()
        with pytest.raises(EngineFailed, match=r"not answered for 0\.2 s") as failed:
            await running.server.run(running.stop)
        assert failed.value.fault is DeviceFault.HUNG
        assert "nvidia-smi" in failed.value.for_operator
        error = await error_of(call)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert read_details(error.trailing_metadata()).reason == "ENGINE_FAILED"
        assert "nvidia-smi" not in error.details()
        assert await running.health_of() == NOT_SERVING
        late = await error_of(running.generate())
        assert dict(late.trailing_metadata())[REFUSED_HEADER] == "DRAINING", "for a proxy"
        lines = (await asyncio.to_thread(running.scrape)).splitlines()
        faults = {line for line in lines if line.startswith("loadout_inference_device_faults_t")}
        assert 'loadout_inference_device_faults_total{kind="hung"} 1.0' in faults
        assert len(faults) == len(DeviceFault), "the others are 0"

    serve(body, step_timeout_seconds=0.2)


@pytest.mark.parametrize("timeout_s", [0.0, 60.0])
def test_an_engine_that_is_slow_is_not_given_up(serve, monkeypatch, timeout_s: float) -> None:
    monkeypatch.setattr(watchdog, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(watchdog, "HANG_SECONDS", 0.05)
    monkeypatch.setattr(watchdog, "CONFIRM_SECONDS", 0.05)

    async def body(running: Running) -> None:
        ended = asyncio.create_task(running.server.run(running.stop))
        running.engine.stuck.set()
        # As long as it would take to be given up with a timeout that is too short.
        await until_async(lambda: running.engine.num_dumps > 0)
        assert not (await asyncio.wait([ended], timeout=0.3))[0]
        running.engine.stuck.clear()
        assert await running.generate()
        running.stop.set()
        await ended

    serve(body, step_timeout_seconds=timeout_s)


def test_drain_finishes_what_runs_and_refuses_what_comes(serve) -> None:
    async def body(running: Running) -> None:
        async def drains() -> bool:
            return await running.health_of() != SERVING

        running.engine.hold.set()
        first = asyncio.create_task(running.generate())
        await until_async(lambda: running.engine.num_running == 1)
        ended = asyncio.create_task(running.server.run(running.stop))
        assert not await drains()
        running.stop.set()
        await until_async(drains)
        assert await running.health_of(SERVICE) == NOT_SERVING
        error = await error_of(running.generate(request_id="late"))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in error.details()
        running.engine.hold.clear()
        assert "".join(r.text for r in await first) == "abc"
        await ended

    serve(body)


STORE_CONNECTED = "loadout_inference_store_connected"


def test_server_that_has_left_the_store_is_not_shown_as_cut_off(serve) -> None:
    """A drain takes longer than the alert on `store_connected` waits."""

    async def body(running: Running) -> None:
        async def connected() -> list[str]:
            lines = (await asyncio.to_thread(running.scrape)).splitlines()
            return [line for line in lines if line.startswith(f"{STORE_CONNECTED} ")]

        async def is_absent() -> bool:
            return not await connected()

        while await connected() != [f"{STORE_CONNECTED} 1.0"]:
            await asyncio.sleep(0.01)
        running.engine.hold.set()
        last = asyncio.create_task(running.generate())
        await until_async(lambda: running.engine.num_running == 1)
        running.stop.set()
        ended = asyncio.create_task(running.server.run(running.stop))
        await until_async(is_absent)
        assert not ended.done()
        running.engine.hold.clear()
        await last
        await ended

    serve(body, store=True)


def test_drain_waits_for_what_operators_have_asked_for(serve) -> None:
    async def body(running: Running) -> None:
        running.engine.hold.set()
        loading = running.stub.LoadAdapter(pb.LoadAdapterRequest(ref="upper"))
        await until_async(lambda: running.engine.num_loading == 1)
        running.stop.set()
        ended = asyncio.create_task(running.server.run(running.stop))
        # Longer than a quiet server, and one without requests, would go on.
        done, _ = await asyncio.wait([ended], timeout=3 * QUIET_SECONDS)
        assert not done
        running.engine.hold.clear()
        assert (await loading).adapter.digest == digest_of("upper")
        await ended

    serve(body, store=True)


def test_when_the_grace_is_over_the_rest_ends_with_a_status(serve) -> None:
    async def body(running: Running) -> None:
        running.engine.hold.set()
        first = asyncio.create_task(running.generate())
        await until_async(lambda: running.engine.num_running == 1)
        running.stop.set()
        await running.server.run(running.stop)
        error = await error_of(first)
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        await until_async(lambda: running.engine.num_running == 0)

    serve(body, grace_seconds=0.1)


def test_a_failed_engine_answers_all_and_ends_the_server(serve) -> None:
    async def body(running: Running) -> None:
        running.engine.hold.set()
        calls = [asyncio.create_task(running.generate(request_id=f"r{i}")) for i in range(3)]
        await until_async(lambda: running.engine.num_running == 3)
        ended = asyncio.create_task(running.server.run(running.stop))
        await asyncio.sleep(0)
        running.engine.fail.set()
        for call in calls:
            error = await error_of(call)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert error.details() == "the engine failed"
            assert read_details(error.trailing_metadata()).reason == "ENGINE_FAILED"
        with pytest.raises(EngineFailed):
            await ended
        assert await running.health_of() == NOT_SERVING
        error = await error_of(running.generate())
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(error.trailing_metadata())[REFUSED_HEADER] == "DRAINING", "for a proxy"

    serve(body)


def test_a_failed_engine_refuses_what_is_still_being_resolved(serve) -> None:
    """It has not reached the engine: its caller is told that another server may answer it."""

    async def body(running: Running) -> None:
        calls = [asyncio.create_task(running.generate(adapter="slow")) for _ in range(3)]
        held = asyncio.create_task(running.generate())
        running.engine.hold.set()
        await until_async(lambda: running.engine.num_running == 1)
        ended = asyncio.create_task(running.server.run(running.stop))
        await asyncio.sleep(0)
        running.engine.fail.set()
        with pytest.raises(EngineFailed):
            await ended
        await running.server.close()
        for call in calls:
            error = await error_of(call)
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert read_details(error.trailing_metadata()).reason == "DRAINING"
        assert (await error_of(held)).code() is grpc.StatusCode.UNAVAILABLE

    serve(body, store=True)
