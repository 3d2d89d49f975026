"""A store, and an inference service over several machines: each an address, or a network namespace,
of this one."""

from __future__ import annotations

import os
import signal
import socket
import sys
from dataclasses import dataclass, field

from loadout.demo.process import Process
from tests.support.servers.links import LOCAL
from tests.system.services import GRACE_S, READY_S, Services

TOKEN_VARIABLE = "LOADOUT_INFERENCE_RENDEZVOUS_TOKEN"
TOKEN = "a secret of all machines"


@dataclass
class NodeServices(Services):
    """`num_ranks` ranks, in so many stages, on two machines, of which the first has the address
    `leader`, and serves. Their token has to be in the environment."""

    num_ranks: int = 2
    num_stages: int = 1
    leader: str = LOCAL
    prefix: tuple[str, ...] = ()
    """Before the second machine's command."""
    rendezvous: str = ""
    node: Process = field(init=False)
    node_metrics: str = field(init=False)

    def __exit__(self, *exc: object) -> None:
        """The other machine ends when the first has drained."""
        if self.node.is_alive:
            os.kill(self.node.pid, signal.SIGTERM)
        super().__exit__(*exc)
        self.exit_codes.append(self.node.stop(GRACE_S))

    def start_inference(self) -> None:
        self.rendezvous = self.rendezvous or f"{self.leader}:{free_port(self.leader)}"
        flags = self.inference_flags
        self.inference_flags = (*flags, *self._node_flags(0))
        self.start_node()
        try:
            super().start_inference()
        except BaseException:
            self.node.stop(0)
            raise
        finally:
            self.inference_flags = flags
        self.node_metrics = self.node.wait_ready(READY_S)["metrics"]

    def start_node(self) -> None:
        ready = self.folder / "node.json"
        command = [
            *(sys.executable, "-m", "inference_svc", "--model", str(self.zoo.model_dir)),
            *("--base-model", "llama", "--store", self.store_address, "--num-threads", "1"),
            *("--metrics-listen", "127.0.0.1:0", "--ready-file", str(ready)),
            *("--kv-memory", "8MiB", "--adapter-memory", "8MiB", "--max-model-len", "256"),
            *self.inference_flags,
            *self._node_flags(1),
        ]
        process = Process if self.prefix else self.process
        self.node = process("node", [*self.prefix, *command], self.folder, ready)

    def _node_flags(self, node: int) -> tuple[str, ...]:
        return (
            *("--tensor-parallel", str(self.num_ranks // self.num_stages), "--nnodes", "2"),
            *("--pipeline-parallel", str(self.num_stages)),
            *("--node-rank", str(node), "--rendezvous", self.rendezvous),
        )


def free_port(address: str) -> int:
    """Returns a port at which nobody listens."""
    with socket.create_server((address, 0)) as server:
        port: int = server.getsockname()[1]
        return port
