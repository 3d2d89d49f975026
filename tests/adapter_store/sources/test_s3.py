"""Against a real S3 server process (moto) over HTTP, and through a proxy that fails on demand."""

from __future__ import annotations

import hashlib
import logging
import threading
from functools import partial

import boto3
import pytest

from adapter_store.errors import InvalidAdapter, LimitExceeded, SourceUnavailable
from adapter_store.sources import s3 as s3_module
from adapter_store.sources.s3 import S3Source, translate_errors
from adapter_store.sources.transfer import RetryPolicy
from servicekit.errors import Draining, FailedPrecondition, InvalidArgument, NotFound
from tests.adapter_store.sources.faulty import Fault, FaultyProxy

pytestmark = pytest.mark.processes

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BODY = bytes(range(256)) * 40
QUICK = RetryPolicy(attempts=3, first_seconds=0.01, max_seconds=0.02)


@pytest.fixture
def endpoint(s3_endpoint):
    """Where the session's S3 server listens."""
    return s3_endpoint


@pytest.fixture
def proxy(endpoint):
    proxy = FaultyProxy(endpoint)
    yield proxy
    proxy.stop()


@pytest.fixture(autouse=True)
def credentials(monkeypatch, tmp_path):
    """The default chain finds these, and nothing of the machine's own."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cr3t-s3cr3t")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(scope="module")
def client(s3_endpoint):
    """Writes what the sources read."""
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "s3cr3t-s3cr3t"}
    return boto3.client("s3", endpoint_url=s3_endpoint, region_name="us-east-1", **keys)


@pytest.fixture
def bucket(client, request):
    """A bucket of its own, with one adapter under team/a."""
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


@pytest.fixture
def shaky(proxy, bucket) -> S3Source:
    """Does as `source`, through the proxy."""
    return S3Source([bucket[0]], proxy.url, retry=QUICK)


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
    with pytest.raises(InvalidArgument, match="--s3-buckets") as caught:
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


def test_a_run_folder_suggests_its_latest_checkpoint(source, bucket, make_staging):
    name, client = bucket
    for key in ("runs/checkpoint-9/x", "runs/checkpoint-10/x", "runs/checkpoint-x/x"):
        client.put_object(Bucket=name, Key=key, Body=b"")
    suggested = f"below it are checkpoint-10, checkpoint-9: .* s3://{name}/runs/checkpoint-10$"
    with pytest.raises(InvalidAdapter, match=suggested):  # also with no object at its top
        source.fetch(f"s3://{name}/runs", make_staging())
    client.put_object(Bucket=name, Key="runs/README.md", Body=b"")
    with pytest.raises(InvalidAdapter, match=suggested):
        source.fetch(f"s3://{name}/runs", make_staging())


def test_what_would_be_dropped_is_refused_by_name(source, bucket, staging):
    name, client = bucket
    client.put_object(Bucket=name, Key="team/a/new_embeddings.safetensors", Body=b"x")
    with pytest.raises(InvalidAdapter, match=r"new_embeddings\.safetensors: rows of ") as caught:
        source.fetch(f"s3://{name}/team/a", staging)
    assert caught.value.reason == "FILE_UNUSED"


def test_mlx_weights_are_read(source, bucket, staging):
    name, client = bucket
    for key in (CONFIG, "adapters.safetensors", "0000100_adapters.safetensors"):
        client.put_object(Bucket=name, Key=f"mlx/{key}", Body=key.encode())
    source.fetch(f"s3://{name}/mlx", staging)
    found = {path.name: path.read_text() for path in staging.folder.iterdir()}
    assert found == {key: key for key in (CONFIG, "adapters.safetensors")}


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


@pytest.mark.parametrize("then", ["reset", "closed"])
@pytest.mark.parametrize("after", [0, 4096, len(BODY) - 1])
def test_broken_connection_is_resumed(shaky, proxy, bucket, staging, monkeypatch, then, after):
    monkeypatch.setattr(s3_module, "STEP_BYTES", 1024)
    proxy.faults = [Fault(WEIGHTS, after=after, then=then)]
    shaky.fetch(f"s3://{bucket[0]}/team/a", staging)
    assert (staging.folder / WEIGHTS).read_bytes() == BODY
    ranges = [asked for path, asked in proxy.gets if WEIGHTS in path]
    assert ranges[0] == ""
    assert len(ranges) == 2
    if then == "closed" and after == 4096:
        assert ranges[1] == "bytes=4096-"


def test_silent_connection_is_dropped_and_resumed(proxy, bucket, staging, monkeypatch):
    monkeypatch.setattr(s3_module, "READ_TIMEOUT_S", 2)
    proxy.faults = [Fault(WEIGHTS, after=4096, then="stalled")]
    source = S3Source([bucket[0]], proxy.url, retry=QUICK)
    source.fetch(f"s3://{bucket[0]}/team/a", staging)
    assert (staging.folder / WEIGHTS).read_bytes() == BODY


@pytest.mark.parametrize("status", [500, 503])
def test_busy_service_is_retried(shaky, proxy, bucket, staging, status):
    proxy.faults = [
        Fault("list-type", status=status, times=2),
        Fault(WEIGHTS, status=status, times=2),
    ]
    shaky.fetch(f"s3://{bucket[0]}/team/a", staging)
    assert (staging.folder / WEIGHTS).read_bytes() == BODY


@pytest.mark.parametrize("path", ["list-type", WEIGHTS])
def test_a_service_that_stays_busy_is_unavailable(shaky, proxy, bucket, staging, path):
    proxy.faults = [Fault(path, status=503, times=1000)]
    with pytest.raises(SourceUnavailable, match="503") as caught:
        shaky.fetch(f"s3://{bucket[0]}/team/a", staging)
    assert caught.value.reason == "SOURCE_UNAVAILABLE"
    assert sum(path in asked for asked, _ in proxy.gets) == QUICK.attempts


def test_progress_is_not_a_failed_attempt(shaky, proxy, bucket, staging, monkeypatch):
    """A connection that breaks often, but each time later, is used to the end."""
    monkeypatch.setattr(s3_module, "STEP_BYTES", 512)
    proxy.faults = [Fault(WEIGHTS, after=1024, then="closed", times=3 * QUICK.attempts)]
    body = bytes(range(256)) * 4 * (3 * QUICK.attempts + 1)
    bucket[1].put_object(Bucket=bucket[0], Key=f"team/a/{WEIGHTS}", Body=body)
    shaky.fetch(f"s3://{bucket[0]}/team/a", staging)
    assert (staging.folder / WEIGHTS).read_bytes() == body


def test_redirect_is_refused(shaky, proxy, bucket, staging, endpoint):
    elsewhere = FaultyProxy(endpoint)
    try:
        place = f"{elsewhere.url}/{bucket[0]}/team/a/{WEIGHTS}"
        proxy.faults = [Fault(WEIGHTS, status=307, location=place, times=1000)]
        with pytest.raises(SourceUnavailable):
            shaky.fetch(f"s3://{bucket[0]}/team/a", staging)
        assert elsewhere.gets == []
    finally:
        elsewhere.stop()


def test_object_replaced_before_a_break_is_not_mixed(shaky, proxy, bucket, staging):
    name, client = bucket

    def replace() -> None:
        client.put_object(Bucket=name, Key=f"team/a/{WEIGHTS}", Body=BODY[::-1])

    proxy.faults = [Fault(WEIGHTS, after=4096, then="closed", action=replace)]
    with pytest.raises(SourceUnavailable, match=f"{WEIGHTS} changed") as caught:
        shaky.fetch(f"s3://{name}/team/a", staging)
    assert caught.value.reason == "SOURCE_CHANGED"


@pytest.mark.parametrize("changed", [CONFIG, WEIGHTS])
def test_an_object_replaced_after_the_listing_is_not_read(shaky, proxy, bucket, staging, changed):
    """Same length, so that only its ETag tells."""
    name, client = bucket
    body = {CONFIG: b"[]", WEIGHTS: BODY[::-1]}[changed]
    proxy.faults = [
        Fault(
            "list-type",
            action=lambda: client.put_object(Bucket=name, Key=f"team/a/{changed}", Body=body),
        )
    ]
    with pytest.raises(SourceUnavailable, match=f"{changed} changed"):
        shaky.fetch(f"s3://{name}/team/a", staging)


def test_files_of_two_moments_are_noticed(shaky, proxy, bucket, staging):
    """The config is replaced after it was read, while the weights still are."""
    name, client = bucket
    config_read = threading.Event()

    def replace() -> None:
        assert config_read.wait(60)
        client.put_object(Bucket=name, Key=f"team/a/{CONFIG}", Body=b"[]")

    proxy.faults = [
        Fault(WEIGHTS, after=4096, action=replace),
        Fault(CONFIG, after=2, action=config_read.set),
    ]
    with pytest.raises(SourceUnavailable, match=f"{CONFIG} changed") as caught:
        shaky.fetch(f"s3://{name}/team/a", staging)
    assert caught.value.reason == "SOURCE_CHANGED"


def test_a_service_without_conditions_is_found_out(shaky, proxy, bucket, staging):
    """A server that answers with what is there now, whatever version was requested."""
    name, client = bucket
    replace = partial(client.put_object, Bucket=name, Key=f"team/a/{WEIGHTS}", Body=BODY[::-1])
    proxy.faults = [
        Fault("list-type", action=replace),
        Fault(WEIGHTS, drop_headers=("If-Match",), times=10),
    ]
    with pytest.raises(SourceUnavailable, match=f"{WEIGHTS} changed"):
        shaky.fetch(f"s3://{name}/team/a", staging)


def test_a_service_without_ranges_is_found_out(shaky, proxy, bucket, staging, monkeypatch):
    monkeypatch.setattr(s3_module, "STEP_BYTES", 1024)
    proxy.faults = [
        Fault(WEIGHTS, after=4096, then="closed"),
        Fault(WEIGHTS, drop_headers=("Range",)),
    ]
    with pytest.raises(SourceUnavailable):
        shaky.fetch(f"s3://{bucket[0]}/team/a", staging)


def test_files_are_read_at_once(shaky, proxy, bucket, staging):
    name, client = bucket
    client.delete_object(Bucket=name, Key=f"team/a/{WEIGHTS}")
    shards = [f"adapter_model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]
    for shard in shards:
        client.put_object(Bucket=name, Key=f"team/a/{shard}", Body=BODY)
    proxy.gate = threading.Barrier(3)  # lets nobody through before three are there
    shaky.fetch(f"s3://{name}/team/a", staging)
    assert proxy.most_at_once >= 3
    assert all((staging.folder / shard).read_bytes() == BODY for shard in shards)


def test_the_first_failure_ends_the_other_files(shaky, proxy, bucket, staging):
    name, client = bucket
    client.delete_object(Bucket=name, Key=f"team/a/{WEIGHTS}")
    for i in (1, 2, 3):
        key = f"team/a/adapter_model-{i:05}-of-00003.safetensors"
        client.put_object(Bucket=name, Key=key, Body=BODY)
    proxy.faults = [
        Fault("adapter_model-00002", status=403),
        Fault("adapter_model-", status=503, times=1000),
    ]
    with pytest.raises(FailedPrecondition, match="00002"):
        S3Source([name], proxy.url, retry=RetryPolicy(100, 0.01, 0.05)).fetch(
            f"s3://{name}/team/a", staging
        )


def test_a_stopping_store_stops_waiting(proxy, bucket, staging):
    proxy.faults = [Fault(WEIGHTS, status=503, action=None, times=1000)]
    proxy.faults.append(Fault(CONFIG, action=staging.cancellation.stop.draining.set))
    with pytest.raises(Draining):
        S3Source([bucket[0]], proxy.url, retry=RetryPolicy(100, 30, 60)).fetch(
            f"s3://{bucket[0]}/team/a", staging
        )


def test_a_bucket_is_read_at_its_own_endpoint(proxy, endpoint, bucket, make_staging, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    source = S3Source([f"{bucket[0]}/team@{proxy.url}", bucket[0]], endpoint)
    source.fetch(f"s3://{bucket[0]}/team/a", make_staging())
    assert proxy.gets
    proxy.gets.clear()
    for name, body in ((CONFIG, b"{}"), (WEIGHTS, b"root")):
        bucket[1].put_object(Bucket=bucket[0], Key=name, Body=body)
    source.fetch(f"s3://{bucket[0]}", make_staging())
    assert proxy.gets == []


def test_no_answer_is_unavailable_and_tells_no_secret(staging, caplog):
    caplog.set_level(logging.DEBUG, "adapter_store")
    source = S3Source(["bucket"], "http://127.0.0.1:9", retry=RetryPolicy(attempts=1))
    with pytest.raises(SourceUnavailable, match="s3://bucket/a/") as caught:
        source.fetch("s3://bucket/a", staging)
    assert "s3cr3t" not in f"{caught.value} {caplog.text}"


def test_without_credentials(endpoint, bucket, staging, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(FailedPrecondition, match="no credentials") as caught:
        S3Source([bucket[0]], endpoint).fetch(f"s3://{bucket[0]}/team/a", staging)
    assert caught.value.reason == "SOURCE_ACCESS_DENIED"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("AccessDenied", FailedPrecondition),
        ("403", FailedPrecondition),
        ("NoSuchKey", NotFound),
        ("412", SourceUnavailable),
        ("SlowDown", SourceUnavailable),
    ],
)
def test_answers_of_the_service_keep_their_code(code, kind):
    from botocore.exceptions import ClientError

    with pytest.raises(kind, match="s3://b/k"), translate_errors("s3://b/k"):
        raise ClientError({"Error": {"Code": code, "Message": "x"}}, "GetObject")
