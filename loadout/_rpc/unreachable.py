"""Explains from gRPC's details why a service cannot be reached, with a remedy."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote

_WHERE = re.compile(r"(?:ipv[46]|unix):(?P<address>\S+): ")
_UNRESOLVED = re.compile(r"(?:errors resolving|DNS resolution failed for) (?P<address>\S+?): ")
_USUALLY = "usually 7070 for the adapter store and 7080 for the inference service"


class _Cause(NamedTuple):
    """A pattern of gRPC's text, and the text for a user."""

    pattern: str
    text: str


_CAUSES = (
    _Cause(
        r"Connection refused|No such file or directory",
        "nothing listens there: start it, or give the address where it listens",
    ),
    _Cause(
        r"WRONG_VERSION_NUMBER|unrecognized name|HTTP_REQUEST",
        "the service there does not use TLS: connect without TLS, or give its TLS address",
    ),
    _Cause(
        r"CERTIFICATE_VERIFY_FAILED.*(expired|not yet valid)",
        "its certificate is not valid now: renew it, or set the clock",
    ),
    _Cause(
        r"(?i)hostname verification|not in peer certificate|name mismatch",
        "its certificate is for another name: use the name in the certificate",
    ),
    _Cause(
        r"CERTIFICATE_VERIFY_FAILED",
        "its certificate is from an untrusted authority: name the authority's "
        "certificate (--tls-ca-file, TlsConfig(ca_file=...))",
    ),
    _Cause(
        r"(?i)certificate required|handshake failure|bad certificate|unknown ca",
        "it does not accept this client's certificate: give a certificate that it trusts "
        "(--tls-cert-file and --tls-key-file, TlsConfig(cert_file=..., key_file=...))",
    ),
    _Cause(
        r"(?i)failed parsing http/2|http1|http/1|unexpected http status",
        f"this is an HTTP port: give the gRPC port, {_USUALLY}",
    ),
    _Cause(
        r"(?i)timed out|timeout|no route to host|unreachable",
        "nothing answers: check the address, the network and firewalls",
    ),
    _Cause(
        r"Socket closed|[Cc]onnection reset|Broken pipe|GOAWAY",
        "it closed the connection at once: if it uses TLS, the client must too (--tls or "
        "--tls-ca-file, tls=...); otherwise another program listens there",
    ),
)


def explain(details: str, service: str) -> str:
    """Returns in one line why the connection to `service` failed.

    Args:
        details: gRPC's details of a call that no service answered.
        service: Name of the service in messages, such as "the adapter store".

    Returns:
        The explanation, or the details themselves if they have another cause.
    """
    unresolved = _UNRESOLVED.search(details)
    if unresolved is not None:
        return (
            f"{service} at {unresolved['address']} cannot be reached: the host is unknown; "
            "check the address"
        )
    if details == "Method not found!":
        return (
            f"{service} does not know this call: it is an older version, or the address belongs "
            f"to another service; the port is {_USUALLY}"
        )
    if not details.startswith("failed to connect to all addresses"):
        return details
    where = _WHERE.search(details)
    place = f" at {unquote(where['address'])}" if where else ""
    for cause in _CAUSES:
        if re.search(cause.pattern, details):
            return f"{service}{place} cannot be reached: {cause.text}"
    return details
