"""Why a service cannot be reached, from what gRPC says, and what to do."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import unquote

_WHERE = re.compile(r"(?:ipv[46]|unix):(?P<address>\S+): ")
_UNRESOLVED = re.compile(r"(?:errors resolving|DNS resolution failed for) (?P<address>\S+?): ")
_USUALLY = "usually 7070 of the adapter store and 7080 of the inference service"


class _Cause(NamedTuple):
    """What gRPC's text has, and what a user reads."""

    pattern: str
    text: str


_CAUSES = (
    _Cause(
        r"Connection refused|No such file or directory",
        "nothing listens there: start it, or give the address where it listens",
    ),
    _Cause(
        r"WRONG_VERSION_NUMBER|unrecognized name|HTTP_REQUEST",
        "it does not use TLS there: connect without TLS, or give the address where it does",
    ),
    _Cause(
        r"CERTIFICATE_VERIFY_FAILED.*(expired|not yet valid)",
        "its certificate is not valid now: renew it, or set the clock",
    ),
    _Cause(
        r"(?i)hostname verification|not in peer certificate|name mismatch",
        "its certificate is for another name: give the name that the certificate has",
    ),
    _Cause(
        r"CERTIFICATE_VERIFY_FAILED",
        "its certificate is of an authority that is not trusted: name the authority's "
        "certificate (--tls-ca-file, TlsConfig(ca_file=...))",
    ),
    _Cause(
        r"(?i)certificate required|handshake failure|bad certificate|unknown ca",
        "it does not accept this client's certificate: give one that it trusts "
        "(--tls-cert-file and --tls-key-file, TlsConfig(cert_file=..., key_file=...))",
    ),
    _Cause(
        r"(?i)failed parsing http/2|http1|http/1|unexpected http status",
        f"that is a port of HTTP: give the one of gRPC, {_USUALLY}",
    ),
    _Cause(
        r"(?i)timed out|timeout|no route to host|unreachable",
        "nothing answers: check the address, the network and the firewall between",
    ),
    _Cause(
        r"Socket closed|[Cc]onnection reset|Broken pipe|GOAWAY",
        "it closed the connection at once: if it uses TLS, so must the client (--tls or "
        "--tls-ca-file, tls=...); otherwise another program listens there",
    ),
)


def explain(details: str, service: str) -> str:
    """Returns in one line why the connection to `service` failed, from the details of a call that
    no service answered; the details themselves where they say something else."""
    unresolved = _UNRESOLVED.search(details)
    if unresolved is not None:
        return (
            f"{service} at {unresolved['address']} cannot be reached: no such host is known; "
            "check the address"
        )
    if details == "Method not found!":
        return (
            f"{service} does not know this call: it is of an older version, or the address is "
            f"another service's; give its port, {_USUALLY}"
        )
    if not details.startswith("failed to connect to all addresses"):
        return details
    where = _WHERE.search(details)
    place = f" at {unquote(where['address'])}" if where else ""
    for cause in _CAUSES:
        if re.search(cause.pattern, details):
            return f"{service}{place} cannot be reached: {cause.text}"
    return details
