"""Refuses new connections of some addresses at a listening socket, in the kernel.

A filter of the socket drops their first packets, which a client sends again after a second, then
after two more. So they cost this process nothing, and come through once the filter is taken away.
Connections that exist do not notice it.
"""

from __future__ import annotations

import ctypes
import errno
import socket
import struct
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

MAX_INSTRUCTIONS = 1024
"""A filter of this many has place for 500 addresses of IPv4, or 112 of IPv6. Old systems hold
20,480 bytes of filters for a socket, which has two while one takes the other's place."""
_ATTACH, _DETACH = 26, 27
_NETWORK = 0xFFF00000
"""From here on the IP header is addressed; without it the TCP header."""
_FLAGS_AT, _SYN, _SYN_ACK = 13, 0x02, 0x12
_V4_SOURCE_AT, _V6_SOURCE_AT = 12, 8
_LOAD, _LOAD_BYTE, _AND, _SHIFT, _IF_EQUAL, _JUMP, _RETURN = (
    0x20,
    0x30,
    0x54,
    0x74,
    0x15,
    0x05,
    0x06,
)
_ALL = 0xFFFFFFFF

Instruction = tuple[int, int, int, int]
"""Code, how many to skip if it holds, and if not, and its operand."""


def refuse(listening: socket.socket, addresses: Sequence[str]) -> bool:
    """Has the socket refuse new connections of these addresses alone; of none, if there are none.
    Of the first of them, if the system has no place for all. Returns whether it could."""
    if not addresses:
        try:
            listening.setsockopt(socket.SOL_SOCKET, _DETACH, 0)
        except OSError as error:
            return error.errno == errno.ENOENT  # it had no filter
        return True
    parsed = [ip_address(each) for each in addresses]
    while parsed:
        program = _program(parsed)
        if len(program) <= MAX_INSTRUCTIONS and _attach(listening, program):
            return True
        parsed = parsed[: len(parsed) // 2]
    return False


def _attach(listening: socket.socket, program: list[Instruction]) -> bool:
    code = b"".join(struct.pack("=HBBI", *each) for each in program)
    held = ctypes.create_string_buffer(code, len(code))
    fields = struct.pack("@HP", len(program), ctypes.addressof(held))
    try:
        listening.setsockopt(socket.SOL_SOCKET, _ATTACH, fields)
    except OSError:
        return False
    return True


def _program(addresses: list[IPv4Address | IPv6Address]) -> list[Instruction]:
    v4: list[Instruction] = []
    v6: list[Instruction] = []
    for each in addresses:
        words = struct.unpack(f"!{len(each.packed) // 4}I", each.packed)
        if each.version == 4:
            # Loaded once, before all of them.
            v4 += [(_IF_EQUAL, 0, 1, words[0]), (_RETURN, 0, 0, 0)]
            continue
        for number, word in enumerate(words):
            v6.append((_LOAD, 0, 0, _NETWORK + _V6_SOURCE_AT + 4 * number))
            v6.append((_IF_EQUAL, 0, 7 - 2 * number, word))
        v6.append((_RETURN, 0, 0, 0))
    v4 = [(_LOAD, 0, 0, _NETWORK + _V4_SOURCE_AT), *v4, (_RETURN, 0, 0, _ALL)]
    return [
        (_LOAD_BYTE, 0, 0, _FLAGS_AT),
        (_AND, 0, 0, _SYN_ACK),
        (_IF_EQUAL, 1, 0, _SYN),
        (_RETURN, 0, 0, _ALL),
        (_LOAD_BYTE, 0, 0, _NETWORK),
        (_SHIFT, 0, 0, 4),
        (_IF_EQUAL, 1, 0, 4),
        (_JUMP, 0, 0, len(v4)),
        *v4,
        *v6,
        (_RETURN, 0, 0, _ALL),
    ]
