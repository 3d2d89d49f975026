"""Reads the comments above the declarations of a proto file."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.descriptor_pb2 import FileDescriptorProto

PACKAGE, MESSAGES, ENUMS, RPC_SERVICES = 2, 4, 5, 6
"""Fields of FileDescriptorProto, with which paths of declarations begin."""
MEMBERS = 2
"""The number of a message's fields, an enum's values, a service's methods."""
ONEOFS = 8


class Comments:
    """The comments of `file`, which is compiled with its source info."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._by_path = {
            tuple(location.path): _text(location.leading_comments)
            for location in file.source_code_info.location
        }

    @property
    def package(self) -> str:
        """Returns the comment on the whole file, above `package`."""
        return self.at(PACKAGE)

    def at(self, *path: int) -> str:
        """Returns the comment above the declaration at a path of descriptor.proto, or ""."""
        return self._by_path.get(path, "")


def declarations(file: FileDescriptorProto) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the name and path of every declaration that needs a comment."""
    yield "package", (PACKAGE,)
    for index, message in enumerate(file.message_type):
        yield message.name, (MESSAGES, index)
        for place, field in enumerate(message.field):
            yield f"{message.name}.{field.name}", (MESSAGES, index, MEMBERS, place)
        for place, oneof in enumerate(message.oneof_decl):
            if not oneof.name.startswith("_"):  # these belong to optional fields
                yield f"{message.name}.{oneof.name}", (MESSAGES, index, ONEOFS, place)
    for index, enum in enumerate(file.enum_type):
        yield enum.name, (ENUMS, index)
        for place, value in enumerate(enum.value):
            yield f"{enum.name}.{value.name}", (ENUMS, index, MEMBERS, place)
    for index, service in enumerate(file.service):
        yield service.name, (RPC_SERVICES, index)
        for place, method in enumerate(service.method):
            yield f"{service.name}.{method.name}", (RPC_SERVICES, index, MEMBERS, place)


def _text(comment: str) -> str:
    """Returns the lines without the space after the slashes."""
    return "\n".join(line.removeprefix(" ").rstrip() for line in comment.splitlines()).strip()
