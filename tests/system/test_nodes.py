"""A model over two machines answers as one process does, and a rank that ends, ends all."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from loadout import Client, errors
from tests.support.forks import EXECUTED_RANKS, ForkedProcess
from tests.support.models.zoo import Zoo
from tests.support.servers.links import LOCAL, second_machine
from tests.support.wait import until
from tests.system.nodes import TOKEN, TOKEN_VARIABLE, NodeServices, free_port
from tests.system.services import Services

PROMPT = list(range(5, 26))
NUM_TOKENS = 32
ANSWER_S = 120.0
"""The bound within which every request is answered: twice the time limit of an exchange, which is
that long for each stage."""
ADAPTERS = ("", "r1", "r3", "r8", "r16", "r33", "embed")


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)


def serve(zoo: Zoo, folder: Path, num_ranks: int = 2, num_stages: int = 1) -> NodeServices:
    flags = ("--adapter-wait-seconds", "60")
    return NodeServices(
        zoo, folder, inference_flags=flags, num_ranks=num_ranks, num_stages=num_stages
    )


def answers(services: Services, names: tuple[str, ...] = ADAPTERS) -> dict[str, list[int]]:
    """Returns the answers to one prompt with each adapter, at the same time."""
    for name in filter(None, names):
        services.client.register(name, services.source(name))

    def answer(name: str) -> list[int]:
        found = services.client.generate(
            PROMPT, adapter=name, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
        )
        return [token for chunk in found for token in chunk.token_ids]

    with ThreadPoolExecutor(len(names)) as threads:
        return dict(zip(names, threads.map(answer, names), strict=True))


def remote_ranks(services: NodeServices) -> list[int]:
    """Returns the processes of the other machine's ranks, as rank 0 has logged them."""
    log = services.inference.log_path.read_text()
    return [int(each) for each in re.findall(r"rank \d+ on node 1 is process (\d+)", log)]


def check_addresses(services: NodeServices) -> None:
    """No rank listens at all addresses, and nobody at the rendezvous any more."""
    processes = [psutil.Process(each) for each in remote_ranks(services)]
    processes += psutil.Process(services.inference.pid).children(recursive=True)
    connections = [each for process in processes for each in process.net_connections()]
    listening = {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}
    assert listening <= {services.leader, "127.0.0.1"}
    ports = {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
    assert int(services.rendezvous.rpartition(":")[2]) not in ports


@pytest.mark.parametrize(
    ("num_ranks", "num_stages"),
    [(2, 1), (2, 2), pytest.param(4, 2, marks=pytest.mark.long)],
)
def test_machines_answer_as_peft(
    num_ranks: int,
    num_stages: int,
    zoos: Callable[[str], Zoo],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mixed adapters in one batch, greedy in fp32. Each machine may have a stage. The rank of a
    second machine without one is a process as elsewhere, and no fork."""
    if num_stages == 1:
        monkeypatch.setenv(EXECUTED_RANKS, "1")
    zoo = zoos("llama")
    with serve(zoo, tmp_path, num_ranks, num_stages) as services:
        assert len(remote_ranks(services)) == num_ranks // 2
        assert health(services.node_metrics) == 200
        check_addresses(services)
        for name, found in answers(services).items():
            assert found == zoo.greedy(name, PROMPT, NUM_TOKENS, guess=found), name
    assert services.exit_codes == [0, 0, 0]


def end_of_request(services: NodeServices, harm: Callable[[], None]) -> str:
    """Returns the error of a request that runs when harm is done; both machines have ended."""
    chunks = iter(services.client.generate(PROMPT, max_tokens=220, ignore_eos=True))
    next(chunks)
    harm()
    with pytest.raises(errors.Unavailable) as caught:
        list(chunks)
    until(lambda: not services.inference.is_alive, 60)
    until(lambda: not services.node.is_alive, 60)
    return str(caught.value)


def restart(services: NodeServices) -> None:
    """Starts both machines again, and has them answer."""
    assert services.inference.stop(0) == 1
    services.node.stop(0)
    services.client.close()
    services.start_inference()
    services.client = Client(inference=services.inference_address, store=services.store_address)
    found = services.client.generate(PROMPT, max_tokens=4, temperature=0.0, ignore_eos=True)
    assert sum(len(chunk.token_ids) for chunk in found) == 4


def test_a_rank_that_is_killed_ends_all(zoos: Callable[[str], Zoo], tmp_path: Path) -> None:
    """The error names it. Both machines can be started again."""
    with serve(zoos("llama"), tmp_path) as services:
        [rank] = remote_ranks(services)
        why = end_of_request(services, lambda: os.kill(rank, signal.SIGKILL))
        assert "rank 1 on node 1 closed its connection" in why
        log = services.node.log_path.read_text()
        assert "loadout: rank 1 was ended by SIGKILL; this machine's other ranks end" in log
        assert services.node.stop(0) == 1
        restart(services)


def all_end(services: NodeServices, harm: Callable[[], None], num_requests: int = 6) -> set[str]:
    """Returns the errors of requests that run when harm is done, which all end."""
    began = threading.Barrier(num_requests + 1)

    def run(_: int) -> str:
        chunks = iter(services.client.generate(PROMPT, max_tokens=220, ignore_eos=True))
        next(chunks)
        began.wait(60)
        with pytest.raises(errors.Unavailable) as caught:
            list(chunks)
        return str(caught.value)

    with ThreadPoolExecutor(num_requests) as threads:
        running = [threads.submit(run, number) for number in range(num_requests)]
        began.wait(60)
        harm()
        found = {each.result(services.num_stages * ANSWER_S) for each in running}
    until(lambda: not services.inference.is_alive, ANSWER_S)
    return found


@pytest.mark.long
@pytest.mark.parametrize("num_stages", [1, 2])
def test_faults_of_a_network(zoos: Callable[[str], Zoo], tmp_path: Path, num_stages: int) -> None:
    """Four ranks on two machines with a link, which may have a stage each: a rank, the second
    machine's process and the link end under load. Every request is answered in time, and both
    machines serve again."""
    zoo = zoos("llama")
    with second_machine() as link:
        services = NodeServices(
            zoo,
            tmp_path,
            store_flags=("--allow-open-access",),
            store_listen=f"{link.leader}:0",
            inference_flags=("--adapter-wait-seconds", "60"),
            num_ranks=4,
            num_stages=num_stages,
            leader=link.leader,
            prefix=link.prefix,
        )
        with services:
            for name, found in answers(services).items():
                assert found == zoo.greedy(name, PROMPT, NUM_TOKENS, guess=found), name
            assert len(remote_ranks(services)) == 2
            first, _ = remote_ranks(services)
            [why] = all_end(services, lambda: os.kill(first, signal.SIGKILL))
            assert "rank 2 on node 1 closed its connection" in why
            restart(services)

            [why] = all_end(services, lambda: os.kill(services.node.pid, signal.SIGKILL))
            assert re.search(r"rank [23] on node 1 closed its connection", why)
            restart(services)

            ranks = remote_ranks(services)

            def cut() -> None:
                if link.can_be_cut:
                    link.cut()
                else:  # what ranks on a link that is cut look like
                    for rank in ranks:
                        os.kill(rank, signal.SIGSTOP)

            [why] = all_end(services, cut)
            assert re.search(r"rank [23] on node 1 does not answer", why)
            # The other side notices by itself.
            until(lambda: not services.node.is_alive, num_stages * ANSWER_S)
            if link.can_be_cut:
                link.mend()
            restart(services)
    assert services.exit_codes == [0, 0, 0]


class Alone:
    """The first machine, whose others do not come."""

    def __init__(self, zoo: Zoo, folder: Path, timeout_s: float) -> None:
        ready, self.rendezvous = folder / "ready.json", f"{LOCAL}:{free_port(LOCAL)}"
        command = [
            *(sys.executable, "-m", "inference_svc", "--model", str(zoo.model_dir)),
            *("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"),
            *("--tensor-parallel", "4", "--nnodes", "2", "--rendezvous", self.rendezvous),
            *("--rendezvous-timeout-seconds", str(timeout_s), "--num-threads", "1"),
        ]
        self.process = ForkedProcess("inference", command, folder, ready)

    @property
    def log(self) -> str:
        return self.process.log_path.read_text()


def test_machines_that_do_not_come(zoos: Callable[[str], Zoo], tmp_path: Path) -> None:
    alone = Alone(zoos("llama"), tmp_path, 1.0)
    until(lambda: not alone.process.is_alive)
    assert alone.process.stop(0) == 1
    missing = f"rank 2 on node 1, rank 3 on node 1 did not come to {alone.rendezvous} within 1 s"
    assert f"loadout: {missing}" in alone.log


def health(address: str) -> int:
    """Returns the status of a machine's page; 0 before it has one."""
    try:
        with urllib.request.urlopen(f"http://{address}/health", timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return 0


def test_a_machine_that_waits_for_the_first(zoos: Callable[[str], Zoo], tmp_path: Path) -> None:
    """Its page says so. It ends at once when it is told to, and well."""
    page = f"127.0.0.1:{free_port('127.0.0.1')}"
    command = [
        *(sys.executable, "-m", "inference_svc", "--model", str(zoos("llama").model_dir)),
        *("--metrics-listen", page, "--num-threads", "1", "--tensor-parallel", "2"),
        *("--nnodes", "2", "--node-rank", "1", "--rendezvous", f"{LOCAL}:{free_port(LOCAL)}"),
    ]
    process = ForkedProcess("node", command, tmp_path, tmp_path / "ready.json")
    until(lambda: health(page) == 503)
    until(lambda: "rank 1 waits for rank 0" in process.log_path.read_text())
    assert process.stop(30) == 0
    assert "Traceback" not in process.log_path.read_text()


def test_a_machine_that_is_ended_while_it_waits(zoos: Callable[[str], Zoo], tmp_path: Path) -> None:
    """At once, and well."""
    alone = Alone(zoos("llama"), tmp_path, 600.0)
    until(lambda: "waiting for rank 2 on node 1, rank 3 on node 1" in alone.log)
    assert alone.process.stop(30) == 0
    assert "Traceback" not in alone.log
