"""Generates docs/api.md and docs/development/image-protocol.md from the protos and from the code of
their calls.

python -m tools.pages.api_docs
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from google.protobuf import descriptor_pb2 as pb
from grpc_tools import protoc

from servicekit.errors import ServiceError
from servicekit.rpc.status import code_for
from tools.pages.api_facts import SERVICES, Service, exact_reasons, meanings, roles_of
from tools.pages.proto_comments import ENUMS, MEMBERS, MESSAGES, RPC_SERVICES, Comments

ROOT = Path(__file__).parents[2]
PATH = ROOT / "docs" / "api.md"
PROTOCOL_PATH = ROOT / "docs" / "development" / "image-protocol.md"
SERVER_CALLS = frozenset({"RegisterLayout", "PullAdapter", "GetText"})
"""Calls that only inference services make. They, and their types, are on the protocol's page."""
PROTOS = ROOT / "protos"
COMMON_ERRORS = "Errors of both services"
ELSEWHERE = "As in "
"""The start of a comment that refers to a field of the same name."""
NEVER_SENT = "Never sent."

INTRODUCTION = """# API

You can call both services over gRPC with the [protos](../protos/loadout). The Python clients
(`loadout.Client`, `loadout.AsyncClient`) have a method for each call, except for calls that only
services make; these are part of the [image protocol](development/image-protocol.md). The HTTP API
has [its own page](http.md). `make docs` generates this page.

**Roles.** With a policy file, each call needs a token (`authorization: Bearer TOKEN`) that has one
of the call's roles. The call then applies only to the token's tenants; see [security](security.md).
Without a policy file, every client may make every call. Health checks (`grpc.health.v1`) need no
token; reflection accepts any token.

**Retry.** The column tells you whether to retry a call whose outcome is unknown: `UNAVAILABLE`
because a connection broke, or the `INTERNAL` or `UNKNOWN` that a proxy makes of it. "yes" means
that the call is idempotent. A call refused with `RetryInfo` or with the reason `DRAINING` was not
executed. You may always retry it, unless you have received responses.

**Errors** have a `google.rpc.Status` in their trailers:

- `ErrorInfo` has a `reason`, a stable identifier for programs. Its metadata `subject` names the
  cause: a field, file, tensor or key.
- `BadRequest` comes with INVALID_ARGUMENT, `QuotaFailure` with an exceeded quota.
- `RetryInfo` comes if waiting helps.

Every call may fail with UNAUTHENTICATED, PERMISSION_DENIED, INVALID_ARGUMENT, NOT_FOUND for its
subject, and UNAVAILABLE. The calls below list their other errors. A bug is INTERNAL with a fixed
text; the service's log has the details.
"""


PROTOCOL = """# Image protocol

You need this page if you write an inference service that loads adapters from the adapter store.
`make docs` generates it. The [API page](../api.md) has all other calls, the roles, and the errors.

1. The service describes its base model with
   [RegisterLayout](#adapter_storev1registerlayout), and gets a layout id and an announcement id.
2. It keeps [WatchAdapters](../api.md#adapter_storev1watchadapters) open with the announcement id,
   and learns which version each name points to.
3. It pulls the image of an adapter for its layout with [PullAdapter](#adapter_storev1pulladapter),
   and the adapter's texts with [GetText](#adapter_storev1gettext).
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


def render() -> dict[Path, str]:
    """Returns the pages by their paths."""
    files = compile_protos()
    pages = [_Page(service, files[service.file]) for service in SERVICES]
    for page in pages:
        page.neighbours = {each.package: each for each in pages}
    parts = [INTRODUCTION, "## Contents\n"]
    for page in pages:
        parts.append(page.contents())
    parts.append(f"- {_link(COMMON_ERRORS, COMMON_ERRORS)}\n")
    shared = _shared_errors()
    for page in pages:
        parts += page.text(shared)
    parts.append(f"## {COMMON_ERRORS}\n")
    parts += _error_table(shared.items())
    store = SERVICES[0]
    protocol = [PROTOCOL, *_Page(store, files[store.file], is_protocol=True).declarations("##")]
    return {
        path: "\n".join(lines).rstrip() + "\n"
        for path, lines in ((PATH, parts), (PROTOCOL_PATH, protocol))
    }


def _shared_errors() -> dict[type[ServiceError], str]:
    """Returns the errors that all services have, with their meanings."""
    first, *others = (dict(meanings(service)) for service in SERVICES)
    return {kind: text for kind, text in first.items() if all(kind in each for each in others)}


def _error_table(errors: Iterable[tuple[type[ServiceError], str]]) -> Iterator[str]:
    yield "| status | reason | meaning |\n|---|---|---|"
    for kind, meaning in errors:
        yield f"| {code_for(kind).name} | `{kind.reason}` | {_line(meaning)} |"
    yield ""


class _Field(NamedTuple):
    name: str
    type: str
    meaning: str


class _Page:
    """One service on one page. Headings start with the package's last two words, so that both
    services' messages of one name have anchors of their own. The fields of requests and responses
    follow their call; comments of these messages are not shown."""

    def __init__(
        self, service: Service, file: pb.FileDescriptorProto, *, is_protocol: bool = False
    ) -> None:
        self._service = service
        self._file = file
        self.package = file.package
        self.neighbours: Mapping[str, _Page] = {}
        """Services on the same page, by package."""
        self._prefix = file.package.removeprefix("loadout.")
        self._comments = Comments(file)
        self._places = {message.name: place for place, message in enumerate(file.message_type)}
        [declared] = file.service
        self._methods = list(declared.method)
        callers = {each.name for each in self._methods} - SERVER_CALLS
        for_callers = callers | self._types_of(callers)
        for_servers = {each.name for each in self._methods} - callers
        for_servers |= {each.name for each in file.message_type} - for_callers
        for_servers |= {each.name for each in file.enum_type} - for_callers
        self._here, self._elsewhere = for_callers, for_servers
        self._other = "development/image-protocol.md"
        if is_protocol:
            self._here, self._elsewhere = for_servers, for_callers
            self._other = "../api.md"

    def _types_of(self, calls: Collection[str]) -> set[str]:
        """Returns the messages and enums that these calls need."""
        found: set[str] = set()
        todo = [
            _name(each)
            for method in self._methods
            if method.name in calls
            for each in (method.input_type, method.output_type)
        ]
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                if name in self._places:
                    fields = self._file.message_type[self._places[name]].field
                    todo += [_name(field.type_name) for field in fields if field.type_name]
        return found

    def contents(self) -> str:
        title = self._service.title
        links = [_link(each, self._section(each)) for each in ("errors", "types", "enums")]
        return f"- {_link(title, title)}: calls, {', '.join(links)}"

    def text(self, shared: Collection[type[ServiceError]]) -> Iterator[str]:
        [declared] = self._file.service
        yield f"## {self._service.title}\n\n`{self._file.package}.{declared.name}`\n"
        yield _escape(self._comments.package) + "\n"
        yield "| call | roles | retry |\n|---|---|---|"
        yield from map(self._summary, self._methods)
        yield ""
        yield from self._calls("###")
        yield from self._errors(shared)
        yield f"### {self._section('types')}\n"
        yield from self._messages("####")
        yield f"### {self._section('enums')}\n"
        yield from self._enums("####")

    def declarations(self, level: str) -> Iterator[str]:
        """Yields the calls, types and enums of this page alone."""
        yield from self._calls(level)
        yield f"{level} Types\n"
        yield from self._messages(f"{level}#")
        yield f"{level} Enums\n"
        yield from self._enums(f"{level}#")

    def _calls(self, level: str) -> Iterator[str]:
        for index, method in enumerate(self._methods):
            if method.name in self._here:
                yield f"{level} {self._heading(method.name)}\n"
                yield _escape(self._comments.at(RPC_SERVICES, 0, MEMBERS, index)) + "\n"
                yield from self._method(method)

    def _messages(self, level: str) -> Iterator[str]:
        of_calls = {
            _name(each)
            for method in self._methods
            for each in (method.input_type, method.output_type)
        }
        for message in self._file.message_type:
            if message.name in self._here - of_calls:
                yield f"{level} {self._heading(message.name)}\n"
                yield _escape(self._comments.at(MESSAGES, self._places[message.name])) + "\n"
                yield from self._fields(message)

    def _enums(self, level: str) -> Iterator[str]:
        for index, declared in enumerate(self._file.enum_type):
            if declared.name in self._here:
                yield f"{level} {self._heading(declared.name)}\n"
                yield from self._enum(declared, index)

    def _section(self, name: str) -> str:
        return f"{name.capitalize()} of the {self._service.title.lower()}"

    def _heading(self, name: str) -> str:
        return f"{self._prefix}.{name}"

    def _summary(self, method: pb.MethodDescriptorProto) -> str:
        action = self._service.actions[method.name]
        roles = ", ".join(roles_of(self._service.roles, action))
        link = self.ref(method.name)
        return f"| {link} | {roles} | {self._service.again[method.name]} |"

    def ref(self, name: str) -> str:
        """Returns the link to a declaration, on this page or the other."""
        return _link(name, self._heading(name), self._other if name in self._elsewhere else "")

    def _method(self, method: pb.MethodDescriptorProto) -> Iterator[str]:
        sides = (
            ("Request", method.input_type, method.client_streaming),
            ("Response", method.output_type, method.server_streaming),
        )
        for side, type_name, is_stream in sides:
            message = self._file.message_type[self._places[_name(type_name)]]
            kind = "stream, no" if is_stream else "no"
            if message.field:
                yield f"{side} (stream):\n" if is_stream else f"{side}:\n"
                yield from self._fields(message)
            else:
                yield f"{side}: {kind} fields.\n"

    def _errors(self, shared: Collection[type[ServiceError]]) -> Iterator[str]:
        yield f"### {self._section('errors')}\n"
        own = [each for each in meanings(self._service) if each[0] not in shared]
        yield f"These errors add to the {_link('errors of both services', COMMON_ERRORS)}.\n"
        yield from _error_table(own)
        exact = exact_reasons(self._service)
        if exact:
            yield f"More specific reasons may replace these{self._service.explained}:\n"
            for _, reasons in groupby(exact, key=lambda reason: reason[0]):
                yield f"- {', '.join(f'`{each}`' for each in reasons)}"
            yield ""

    def _fields(self, message: pb.DescriptorProto) -> Iterator[str]:
        """Yields a line for each field; fields that are described at the same other place share
        one."""
        rows = [self._field(message, place) for place in range(len(message.field))]
        shared: dict[str, list[str]] = {}
        for row in rows:
            if row.meaning.startswith(ELSEWHERE):
                shared.setdefault(row.meaning, []).append(f"`{row.name}`")
        for row in rows:
            if names := shared.pop(row.meaning, []):
                yield f"- {', '.join(names)}: {self._with_link(row.meaning)}"
            elif not row.meaning.startswith(ELSEWHERE):
                yield f"- `{row.name}` ({row.type}): {row.meaning}"
        yield ""
        for place, _ in enumerate(message.oneof_decl):
            parts = [
                f"`{field.name}`"
                for field in message.field
                if field.HasField("oneof_index")
                and field.oneof_index == place
                and not field.proto3_optional
            ]
            if parts:
                yield f"Exactly one of {', '.join(parts)} is set.\n"

    def _with_link(self, meaning: str) -> str:
        """Returns a comment that begins with ELSEWHERE, with a link to the call or type. A request
        or response is shown at its call."""
        name = re.match(r"\w+", meaning.removeprefix(ELSEWHERE))
        assert name is not None, meaning
        place = re.sub(r"(Request|Response)$", "", name[0])
        return f"{ELSEWHERE}{self.ref(place)}{meaning.removeprefix(ELSEWHERE + name[0])}"

    def _field(self, message: pb.DescriptorProto, place: int) -> _Field:
        field = message.field[place]
        meaning = self._comments.at(MESSAGES, self._places[message.name], MEMBERS, place)
        return _Field(field.name, self._field_type(message, field), _line(meaning))

    def _enum(self, declared: pb.EnumDescriptorProto, index: int) -> Iterator[str]:
        yield _escape(self._comments.at(ENUMS, index)) + "\n"
        for place, value in enumerate(declared.value):
            meaning = self._comments.at(ENUMS, index, MEMBERS, place)
            if meaning != NEVER_SENT:
                yield f"- `{value.name}`: {_line(meaning)}"
        yield ""

    def _field_type(self, message: pb.DescriptorProto, field: pb.FieldDescriptorProto) -> str:
        entries = {nested.name: nested for nested in message.nested_type}
        entry = entries.get(_name(field.type_name))
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

    def _type(self, full_name: str) -> str:
        package, _, name = full_name.lstrip(".").rpartition(".")
        page = self if package == self.package else self.neighbours.get(package)
        return f"`{package}.{name}`" if page is None else page.ref(name)


def _name(full_name: str) -> str:
    """Returns a type's name without its package."""
    return full_name.rpartition(".")[2]


def _link(text: str, heading: str, page: str = "") -> str:
    """Returns the link to a heading of this page or of another, as GitHub names its anchors."""
    anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    return f"[{text}]({page}#{anchor})"


def _line(comment: str) -> str:
    return _escape(" ".join(comment.split()))


def _escape(text: str) -> str:
    """Escapes markup, except between backticks."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([<*\[])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def main() -> None:
    for path, text in render().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
