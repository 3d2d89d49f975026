"""How a store hands the file of an image to a service on the same machine, over a socket.

The store greets each connection with `GREETING` and an id of its process. A call of PullAdapter
with this id may be answered with a ticket. Who sends the ticket over the socket gets `GIVEN` and
the descriptor of the image's file, once; for any other ticket `REFUSED` and nothing else. The
receiver keeps the connection open as long as it maps the file.

The file has exactly the image's bytes, and `SEALS`: nobody can change it any more. Its owner may be
anybody, so a receiver checks the seals, and the bytes against the hashes of the call.
"""

from __future__ import annotations

GREETING = b"loadout share 1\n"
SHARE_ID_BYTES = 16
TICKET_BYTES = 32
GIVEN, REFUSED = b"+", b"-"

ADD_SEALS, GET_SEALS = 1033, 1034
"""Linux's numbers of these commands of fcntl, whose module has them on Linux only."""
SEAL_SEAL, SEAL_SHRINK, SEAL_GROW, SEAL_WRITE = 1, 2, 4, 8
SEALS = SEAL_SHRINK | SEAL_GROW | SEAL_WRITE
"""The seals that a receiver needs: the bytes and their number stay as they are."""

REFUSALS = ("other_store", "resumed", "building", "in_use", "small", "no_file", "too_many")
"""Why a store streams the bytes nevertheless: the id is another process's; the call resumes an
image; the image is not complete, others read it as it was built, or it is too small; the store has
no file of it, or the account has its share of tickets."""
