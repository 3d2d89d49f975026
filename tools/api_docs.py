"""Generates docs/api.md from the protos and from the code of their calls.

python -m tools.api_docs
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import descriptor_pb2 as pb
from grpc_tools import protoc

from servicekit.rpc.status import code_for
from tools.api_facts import SERVICES, Service, exact_reasons, meanings, roles_of
from tools.proto_comments import ENUMS, MEMBERS, MESSAGES, RPC_SERVICES, Comments

ROOT = Path(__file__).parent.parent
PATH = ROOT / "docs" / "api.md"
PROTOS = ROOT / "protos"

INTRODUCTION = """# API

Both services speak gRPC. `make docs` generates this page from the [protos](../protos/loadout) and
the code; a test checks that it is current. The HTTP API has [a page of its own](http.md); the
Python clients (`loadout.Client`, `loadout.AsyncClient`) have a method for each call, except those
that only services make.

**Roles**: with a policy file each call needs a token (`authorization: Bearer TOKEN`) with one of
these roles, and applies to the token's tenants only; see [security](security.md). Without a policy
file every client may make every call. Health (`grpc.health.v1`) needs no token, reflection any.

**Retry**: whether a call with an unknown outcome (`UNAVAILABLE` because a connection broke, or what
proxies turn it into: `INTERNAL`, `UNKNOWN`) may be retried. "yes": the call is idempotent. A call
that was refused with `RetryInfo`, or with the reason `DRAINING`, has not been executed, unless
responses were received before: it may always be retried.

**Errors** carry a `google.rpc.Status` in their trailers, with an `ErrorInfo`: its `reason` is a
stable identifier for programs, its metadata `subject` names the cause (a field, file, tensor or
key). INVALID_ARGUMENT has a `BadRequest`, an exceeded quota a `QuotaFailure`, and if waiting helps
there is a `RetryInfo`. Every call may fail with UNAUTHENTICATED, PERMISSION_DENIED,
INVALID_ARGUMENT, NOT_FOUND for its subject, and UNAVAILABLE; the calls below list further errors.
Bugs are INTERNAL with a fixed text; the service's log has the details.
"""


def compile_protos() -> dict[str, pb.FileDescriptorProto]:
    """Returns the files of SERVICES with their comments."""
    names = [service.file for service in SERVICES]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "protos"
        options = [f"-I{PROTOS}", "--include_source_info", f"--descriptor_set_out={path}"]
        well_known = Path(protoc.__file__).parent / "_proto"
        if protoc.main(["protoc", f"-I{well_known}", *options, *names]) != 0:
            raise SystemExit("the protos do not compile")
        found = pb.FileDescriptorSet.FromString(path.read_bytes())
    return {file.name: file for file in found.file}


def render() -> str:
    """The page."""
    files = compile_protos()
    pages = [_Page(service, files[service.file]) for service in SERVICES]
    parts = [INTRODUCTION, "## Contents\n"]
    for page in pages:
        parts += page.contents()
    for page in pages:
        parts += page.text()
    return "\n".join(parts).rstrip() + "\n"


class _Page:
    """One service. Headings start with the package's last two words, so that both services'
    messages of one name have anchors of their own."""

    def __init__(self, service: Service, file: pb.FileDescriptorProto) -> None:
        self._service = service
        self._file = file
        self._prefix = file.package.removeprefix("loadout.")
        self._comments = Comments(file)

    def contents(self) -> list[str]:
        methods = " · ".join(_link(m.name, self._heading(m.name)) for m in self._methods())
        messages = " · ".join(_link(m.name, self._heading(m.name)) for m in self._file.message_type)
        enums = " · ".join(_link(e.name, self._heading(e.name)) for e in self._file.enum_type)
        title = self._service.title
        errors = _link("errors", f"Errors of the {title.lower()}")
        return [
            f"- {_link(title, title)}: {errors}",
            f"  - calls: {methods}",
            f"  - messages: {messages}",
            f"  - enums: {enums}",
            "",
        ]

    def text(self) -> Iterator[str]:
        [declared] = self._file.service
        yield f"## {self._service.title}\n\n`{self._file.package}.{declared.name}`\n"
        yield _escape(self._comments.package) + "\n"
        yield "| call | roles | retry |\n|---|---|---|"
        yield from map(self._summary, declared.method)
        yield ""
        for index, method in enumerate(declared.method):
            yield from self._method(method, self._comments.at(RPC_SERVICES, 0, MEMBERS, index))
        yield from self._errors()
        for index, message in enumerate(self._file.message_type):
            yield from self._message(message, index)
        for index, declared_enum in enumerate(self._file.enum_type):
            yield from self._enum(declared_enum, index)

    def _methods(self) -> list[pb.MethodDescriptorProto]:
        return [method for service in self._file.service for method in service.method]

    def _heading(self, name: str) -> str:
        return f"{self._prefix}.{name}"

    def _summary(self, method: pb.MethodDescriptorProto) -> str:
        action = self._service.actions[method.name]
        roles = ", ".join(roles_of(self._service.roles, action))
        link = _link(method.name, self._heading(method.name))
        return f"| {link} | {roles} | {self._service.again[method.name]} |"

    def _method(self, method: pb.MethodDescriptorProto, comment: str) -> Iterator[str]:
        sent = self._type(method.input_type, is_stream=method.client_streaming)
        answered = self._type(method.output_type, is_stream=method.server_streaming)
        yield f"### {self._heading(method.name)}\n"
        yield f"{sent} → {answered}\n"
        yield _escape(comment) + "\n"

    def _errors(self) -> Iterator[str]:
        yield f"### Errors of the {self._service.title.lower()}\n"
        yield "| status | reason | meaning |\n|---|---|---|"
        for kind, meaning in meanings(self._service):
            yield f"| {code_for(kind).name} | `{kind.reason}` | {_cell(meaning)} |"
        yield ""
        exact = ", ".join(f"`{reason}`" for reason in exact_reasons(self._service.folder))
        if exact:
            yield f"More specific reasons, in place of these: {exact}.\n"

    def _message(self, message: pb.DescriptorProto, index: int) -> Iterator[str]:
        yield f"### {self._heading(message.name)}\n"
        yield _escape(self._comments.at(MESSAGES, index)) + "\n"
        if message.field:
            yield "| field | number | type | meaning |\n|---|---|---|---|"
        for place, field in enumerate(message.field):
            meaning = self._comments.at(MESSAGES, index, MEMBERS, place)
            if field.HasField("oneof_index") and not field.proto3_optional:
                meaning = f"{meaning} One of `{message.oneof_decl[field.oneof_index].name}`."
            type_name = self._field_type(message, field)
            yield f"| `{field.name}` | {field.number} | {type_name} | {_cell(meaning)} |"
        if message.field:
            yield ""

    def _enum(self, declared: pb.EnumDescriptorProto, index: int) -> Iterator[str]:
        yield f"### {self._heading(declared.name)}\n"
        yield _escape(self._comments.at(ENUMS, index)) + "\n"
        yield "| value | number | meaning |\n|---|---|---|"
        for place, value in enumerate(declared.value):
            meaning = self._comments.at(ENUMS, index, MEMBERS, place)
            yield f"| `{value.name}` | {value.number} | {_cell(meaning)} |"
        yield ""

    def _field_type(self, message: pb.DescriptorProto, field: pb.FieldDescriptorProto) -> str:
        entries = {nested.name: nested for nested in message.nested_type}
        entry = entries.get(field.type_name.rpartition(".")[2])
        if entry is not None and entry.options.map_entry:
            key, value = (self._plain_type(part) for part in entry.field)
            return f"map of {key} to {value}"
        plain = self._plain_type(field)
        if field.label == field.LABEL_REPEATED:
            return f"repeated {plain}"
        return f"optional {plain}" if field.proto3_optional else plain

    def _plain_type(self, field: pb.FieldDescriptorProto) -> str:
        if field.type_name:
            return self._type(field.type_name)
        return pb.FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()

    def _type(self, full_name: str, *, is_stream: bool = False) -> str:
        package, _, name = full_name.lstrip(".").rpartition(".")
        is_ours = package == self._file.package
        shown = _link(name, self._heading(name)) if is_ours else f"`{package}.{name}`"
        return f"stream of {shown}" if is_stream else shown


def _link(text: str, heading: str) -> str:
    """Returns the link to a heading of this page, as GitHub names its anchors."""
    anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    return f"[{text}](#{anchor})"


def _cell(comment: str) -> str:
    return _escape(" ".join(comment.split())).replace("|", "\\|")


def _escape(text: str) -> str:
    """So that nothing is read as markup but what lies between backticks."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([<*\[])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def main() -> None:
    PATH.write_text(render())


if __name__ == "__main__":
    main()
