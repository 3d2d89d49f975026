"""What a production cluster has beside our pods: PostgreSQL in a container, an S3 server here."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress

import boto3
import yaml
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from tests.containers.dns import GATEWAY
from tests.containers.pods import NETWORK
from tools.containers.bases import POSTGRES
from tools.containers.engine import ContainersFailed, podman

START_S = 60.0
S3_PORT = 443
"""The one that the policies name, though without TLS."""
KEYS = {"AWS_ACCESS_KEY_ID": b"test", "AWS_SECRET_ACCESS_KEY": b"test"}
SERVE_POSTGRES = """
initdb --pgdata /tmp/data --encoding UTF8 --auth trust --username loadout &&
echo 'host all all 0.0.0.0/0 trust' >> /tmp/data/pg_hba.conf &&
exec postgres -D /tmp/data -h 0.0.0.0 -k /tmp
"""


def start_postgres() -> str:
    """Returns the DSN of an empty catalog, once it can be connected to."""
    name = "loadout-test-postgres"
    options = ("--detach", "--name", name, "--label", "loadout-test", "--network", NETWORK)
    podman("run", *options, POSTGRES.name, "sh", "-c", SERVE_POSTGRES)
    end = time.monotonic() + START_S
    while True:
        with suppress(ContainersFailed):
            podman("exec", name, "pg_isready", "--host", "127.0.0.1")
            break
        assert time.monotonic() < end, podman("logs", name)
        time.sleep(0.5)
    [found] = yaml.safe_load(podman("inspect", name))
    address = found["NetworkSettings"]["Networks"][NETWORK]["IPAddress"]
    return f"postgresql+psycopg://loadout@{address}/postgres"


class S3Server:
    """An S3 server that pods reach at `url`, with a bucket of each name, until it is closed."""

    url = f"http://{GATEWAY}:{S3_PORT}"

    def __init__(self, *buckets: str) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", str(S3_PORT)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{S3_PORT}",
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
            config=Config(retries={"max_attempts": 0}),
        )
        end = time.monotonic() + START_S
        for bucket in buckets:
            while True:
                with suppress(BotoCoreError):
                    client.create_bucket(Bucket=bucket)
                    break
                assert time.monotonic() < end, "the S3 server does not start"
                time.sleep(0.5)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
