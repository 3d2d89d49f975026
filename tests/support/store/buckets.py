"""A bucket that replicas of a store share."""

from __future__ import annotations

import boto3

AWS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_CONFIG_FILE": "/nonexistent",
    "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
    "AWS_EC2_METADATA_DISABLED": "true",
}


class Shared:
    """The bucket that the replicas share, seen from outside."""

    def __init__(self, endpoint: str, name: str) -> None:
        self.uri = f"s3://{name}/store"
        self._name = name
        self._client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )
        self._client.create_bucket(Bucket=name)

    def keys(self, under: str) -> list[str]:
        found = self._client.list_objects_v2(Bucket=self._name, Prefix=f"store/{under}/")
        return [entry["Key"] for entry in found.get("Contents", ())]

    def close(self) -> None:
        self._client.close()
