"""Requests that two readers could understand differently are refused, and their connections
closed."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from tests.support.access.certificates import Authority
from tests.support.inference.connections import HEALTH, connected
from tests.support.inference.front import Front

POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
AMBIGUOUS = {
    "two lengths": POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "two lengths, the other way": POST
    + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "line feeds": HEALTH.replace(b"\r\n", b"\n"),
    "a line feed after a header": b"GET /health HTTP/1.1\r\nhost: x\nx: y\r\n\r\n",
    "a line feed at the end": b"GET /health HTTP/1.1\r\nhost: x\r\n\n",
    "a folded header": b"GET /health HTTP/1.1\r\nhost: x\r\nx: a\r\n b\r\n\r\n",
    "a header folded by a tab": b"GET /health HTTP/1.1\r\nhost: x\r\nx: a\r\n\tb\r\n\r\n",
    "two tokens": b"GET /health HTTP/1.1\r\nhost: x\r\nauthorization: Bearer a\r\n"
    b"Authorization: Bearer b\r\n\r\n",
    "chunks of HTTP/1.0": CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"0\r\n\r\n",
    "a trailer": CHUNKED + b"2\r\n{}\r\n0\r\nx: y\r\n\r\n",
    "a token in a trailer": CHUNKED + b"0\r\nauthorization: Bearer a\r\n\r\n",
    "a folded trailer": CHUNKED + b"0\r\nx: y\r\n z\r\n\r\n",
    "a line feed after a trailer": CHUNKED + b"0\r\nx: y\n\n",
    "a line feed after the last chunk": CHUNKED + b"0\r\n\n",
    "line feeds around the last chunk": CHUNKED + b"0\n\n",
    "a line feed before a chunk": CHUNKED + b"2\n{}\r\n0\r\n\r\n",
    "a line feed in an extension": CHUNKED + b"2;x\ny\r\n{}\r\n0\r\n\r\n",
    "a line feed after a chunk": CHUNKED + b"2\r\n{}\n0\r\n\r\n",
}


def test_ambiguous_requests_are_refused(serve_http) -> None:
    """Whole, or byte by byte; what follows on the connection is not answered."""

    async def answer_to(front: Front, parts: list[bytes]) -> bytes:
        async with connected(front) as raw:
            for each in parts:
                await raw.send(each)
                await asyncio.sleep(0)
            answer = b""
            while part := await raw.read():
                answer += part
            return answer

    async def body(front: Front) -> None:
        for name, request in AMBIGUOUS.items():
            answer = await answer_to(front, [request + HEALTH])
            assert answer.startswith(b"HTTP/1.1 400 "), name
            assert answer.count(b"HTTP/1.1") == 1, name
        for name in ("a folded header", "a line feed after the last chunk"):
            slowly = [bytes([byte]) for byte in AMBIGUOUS[name]]
            assert (await answer_to(front, slowly)).startswith(b"HTTP/1.1 400 "), name
        # After an answered request on the same connection, too.
        async with connected(front) as raw:
            await raw.send(HEALTH)
            assert (await raw.read()).startswith(b"HTTP/1.1 200 ")
            await raw.send(AMBIGUOUS["two tokens"])
            assert (await raw.read()).startswith(b"HTTP/1.1 400 ")
            assert await raw.ends()

    serve_http(body)


@pytest.mark.parametrize("name", ["two lengths", "line feeds"])
def test_ambiguous_requests_are_refused_over_tls(serve_http, tmp_path: Path, name: str) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("service")
    context = ssl.create_default_context(cafile=authority.path)

    async def body(front: Front) -> None:
        host, port = front.running.server.http_address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
        writer.write(AMBIGUOUS[name] + HEALTH)
        answer = await reader.read()  # until the connection ends
        writer.close()
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1") == 1

    serve_http(body, tls_cert_file=cert, tls_key_file=key)


def test_unambiguous_ones_are_answered(serve_http) -> None:
    """Line feeds of a body, and lengths in chunks, are no headers."""

    async def body(front: Front) -> None:
        sent = b'{"model":\n "base",\n "prompt": "a", "max_tokens": 1}\n\n'
        chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(sent), sent)
        for framing in (
            b"content-length: %d\r\n\r\n%s" % (len(sent), sent),
            b"transfer-encoding: chunked\r\n\r\n" + chunk,
        ):
            async with connected(front) as raw:
                *most, last = POST + framing  # in two parts, the end of a body between them
                await raw.send(bytes(most))
                await asyncio.sleep(0)
                await raw.send(bytes([last]) + HEALTH)
                answer = b""
                while answer.count(b"HTTP/1.1 200 ") < 2:
                    part = await raw.read()
                    assert part, answer
                    answer += part

    serve_http(body)
