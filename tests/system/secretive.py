"""Texts that look as secrets do, in requests that are all refused."""

from __future__ import annotations

import pytest

from loadout import Client, errors

LOOK_SECRET = {
    "a source": "s3://someone:source-secret-8@bucket/prefix",
    "a token as a user": "https://user-secret-12@h/a",
    "a reference": "https://h/a?X-Amz-Signature=reference-secret-9",
    "a header": "Bearer header-secret-10",
    "a password": "Basic header-secret-13",
    "a setting": "aws_secret_access_key=setting-secret-14",
    "a key": "-----BEGIN PRIVATE KEY-----\nkey-secret-15\n-----END PRIVATE KEY-----",
}
NUMBERS = (8, 9, 10, 12, 13, 14, 15)
HELD = tuple(f"secret-{number}" for number in NUMBERS)
"""What nobody may read of them."""


def fail_with(client: Client, text: str, prompt: str = "prompt") -> None:
    """Sends a text as a source, as a reference, and as a generation's adapter; all fail."""
    with pytest.raises(errors.LoadoutError):
        client.register("x", text if "://" in text else f"s3://nowhere/{text}")
    with pytest.raises(errors.LoadoutError):
        client.load(text)
    with pytest.raises(errors.LoadoutError):
        client.complete(prompt, adapter=text, request_id="failing")
