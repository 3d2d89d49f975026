"""Against a real S3 server process in this machine's memory (moto), over HTTP."""

from __future__ import annotations

import hashlib

import boto3
import pytest
from botocore.response import StreamingBody
from moto.server import ThreadedMotoServer
from urllib3.exceptions import ProtocolError

from adapter_store.errors import (
    InvalidAdapter,
    InvalidArgument,
    LimitExceeded,
    NotFound,
    PreconditionFailed,
    SourceUnavailable,
)
from adapter_store.sources import s3 as s3_module
from adapter_store.sources.s3 import S3Source

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BODY = bytes(range(256)) * 40


@pytest.fixture(scope="module")
def endpoint():
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(autouse=True)
def credentials(monkeypatch, tmp_path):
    """The default chain finds these, and nothing of the machine's own."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cr3t-s3cr3t")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def bucket(endpoint, request):
    """A bucket of its own, with one adapter under team/a."""
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    name = f"b{abs(hash(request.node.name)) % 10**12}"
    client.create_bucket(Bucket=name)
    for key, body in (
        (f"team/a/{CONFIG}", b"{}"),
        (f"team/a/{WEIGHTS}", BODY),
        ("team/a/README.md", b"not needed"),
        (f"team/a/checkpoint-1/{WEIGHTS}", b"not needed"),
        (f"team/ab/{CONFIG}", b"another"),
    ):
        client.put_object(Bucket=name, Key=key, Body=body)
    return name, client


@pytest.fixture
def source(endpoint, bucket) -> S3Source:
    return S3Source([bucket[0]], endpoint)


def test_only_the_adapters_files_are_copied(source, bucket, staging):
    revision = source.fetch(f"s3://{bucket[0]}/team/a", staging)
    etags = [hashlib.md5(body).hexdigest() for body in (b"{}", BODY)]
    assert revision == f"{CONFIG}={etags[0]} {WEIGHTS}={etags[1]}"
    files = {path.name: path.read_bytes() for path in staging.folder.iterdir()}
    assert files == {CONFIG: b"{}", WEIGHTS: BODY}


def test_a_trailing_slash_and_the_buckets_root(source, bucket, make_staging):
    source.fetch(f"s3://{bucket[0]}/team/a/", make_staging())
    for name, body in ((CONFIG, b"{}"), (WEIGHTS, b"root")):
        bucket[1].put_object(Bucket=bucket[0], Key=name, Body=body)
    staging = make_staging()
    source.fetch(f"s3://{bucket[0]}", staging)
    assert (staging.folder / WEIGHTS).read_bytes() == b"root"


@pytest.mark.parametrize(
    ("allowed", "prefix", "is_allowed"),
    [
        ("{}", "team/a", True),
        ("{}/team", "team/a", True),
        ("{}/team/a", "team/a", True),
        ("{}/team/a", "team/ab", False),
        ("{}/tea", "team/a", False),
        ("{}/team/a", "team", False),
        ("other", "team/a", False),
    ],
)
def test_the_allow_list(endpoint, bucket, staging, allowed, prefix, is_allowed):
    source = S3Source([allowed.format(bucket[0])], endpoint)
    if is_allowed:
        source.fetch(f"s3://{bucket[0]}/{prefix}", staging)
        return
    with pytest.raises(InvalidArgument, match="s3_buckets") as caught:
        source.fetch(f"s3://{bucket[0]}/{prefix}", staging)
    assert caught.value.reason == "SOURCE_NOT_ALLOWED"


@pytest.mark.parametrize("prefix", ["a/../b", "..", "a//b", "./a"])
def test_keys_that_others_would_normalise_are_refused(source, bucket, staging, prefix):
    with pytest.raises(InvalidArgument, match="s3://bucket/prefix"):
        source.fetch(f"s3://{bucket[0]}/{prefix}", staging)


def test_what_is_missing_is_named(endpoint, source, bucket, staging):
    with pytest.raises(NotFound, match=f"s3://{bucket[0]}/nowhere/"):
        source.fetch(f"s3://{bucket[0]}/nowhere", staging)
    with pytest.raises(NotFound, match="NoSuchBucket"):
        S3Source(["no-such-bucket"], endpoint).fetch("s3://no-such-bucket/a", staging)
    with pytest.raises(InvalidAdapter, match=f"s3://{bucket[0]}/team/ab/: {WEIGHTS} is missing"):
        source.fetch(f"s3://{bucket[0]}/team/ab", staging)


def test_a_pickle_is_refused_by_name(source, bucket, staging):
    name, client = bucket
    client.delete_object(Bucket=name, Key=f"team/a/{WEIGHTS}")
    client.put_object(Bucket=name, Key="team/a/adapter_model.bin", Body=b"\x80\x04")
    with pytest.raises(InvalidAdapter, match=r"adapter_model\.bin is a pickle"):
        source.fetch(f"s3://{name}/team/a", staging)


def test_limits_hold_before_the_first_byte(source, bucket, make_staging):
    staging = make_staging(max_file_bytes=len(BODY) - 1)
    with pytest.raises(LimitExceeded, match=WEIGHTS):
        source.fetch(f"s3://{bucket[0]}/team/a", staging)
    assert list(staging.folder.iterdir()) == []


def after_first_read(monkeypatch, action) -> None:
    """Reads the weights in small steps, and calls `action` after the first of them."""
    monkeypatch.setattr(s3_module, "READ_BYTES", 1000)
    read = StreamingBody.read
    done = []

    def read_then(self, amt=None):
        data = read(self, amt)
        if data and data != b"{}" and not done:
            done.append(True)
            action()
        return data

    monkeypatch.setattr(StreamingBody, "read", read_then)


def test_a_broken_connection_is_taken_up_where_it_broke(source, bucket, staging, monkeypatch):
    def fail() -> None:
        raise ProtocolError("connection broken")

    after_first_read(monkeypatch, fail)
    source.fetch(f"s3://{bucket[0]}/team/a", staging)
    assert (staging.folder / WEIGHTS).read_bytes() == BODY


def test_an_object_replaced_while_read_is_noticed(source, bucket, staging, monkeypatch):
    name, client = bucket

    def replace() -> None:
        client.put_object(Bucket=name, Key=f"team/a/{WEIGHTS}", Body=BODY[::-1])
        raise ProtocolError("connection broken")

    after_first_read(monkeypatch, replace)
    with pytest.raises(SourceUnavailable, match=f"{WEIGHTS} changed") as caught:
        source.fetch(f"s3://{name}/team/a", staging)
    assert caught.value.reason == "SOURCE_CHANGED"


def test_files_of_two_moments_are_noticed(source, bucket, staging, monkeypatch):
    name, client = bucket
    after_first_read(
        monkeypatch,
        lambda: client.put_object(Bucket=name, Key=f"team/a/{CONFIG}", Body=b"{ }"),
    )
    with pytest.raises(SourceUnavailable, match=f"{CONFIG} changed"):
        source.fetch(f"s3://{name}/team/a", staging)


def test_no_answer_is_unavailable_and_tells_no_secret(staging, monkeypatch):
    monkeypatch.setattr(s3_module, "MAX_ATTEMPTS", 1)
    source = S3Source(["bucket"], "http://127.0.0.1:9")
    with pytest.raises(SourceUnavailable, match="s3://bucket/a/") as caught:
        source.fetch("s3://bucket/a", staging)
    assert "s3cr3t" not in str(caught.value)


def test_without_credentials(endpoint, bucket, staging, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(PreconditionFailed, match="no credentials") as caught:
        S3Source([bucket[0]], endpoint).fetch(f"s3://{bucket[0]}/team/a", staging)
    assert caught.value.reason == "SOURCE_ACCESS_DENIED"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("AccessDenied", PreconditionFailed),
        ("403", PreconditionFailed),
        ("NoSuchKey", NotFound),
        ("412", SourceUnavailable),
        ("SlowDown", SourceUnavailable),
    ],
)
def test_answers_of_the_service_keep_their_code(code, kind):
    from botocore.exceptions import ClientError

    with pytest.raises(kind, match="s3://b/k"), s3_module._translated("s3://b/k"):
        raise ClientError({"Error": {"Code": code, "Message": "x"}}, "GetObject")
