"""Chunks over connections of their own: in place on both sides, by plain TCP on loopback, through TLS elsewhere.

    -> magic "FBST" | ticket 16 | what u32 | group u32 | key 32 | capacity u64
    ALL    <- REPLY (status u32 | length of the header u32 | length of the payload u64 | address u64 | epoch u64)
              | header | payload
    PLACE  <- REPLY | header
           -> one byte: what lies at `address` has been read (by NIXL)
    PUSH   (`capacity` is the payload's length)
           -> OFFER (length of the header u32 | length of the namespace's encoding u32) | header | encoding
           <- REPLY: send it, or why not
           -> payload
           <- REPLY: it is stored and verified, or why not

One chunk after another on a connection. A ticket comes with Welcome, over the control connection, so whoever may ask
there may ask here; so does the fingerprint of the listener's certificate (`tls.py`). Both sides (`stream_server.py`,
`streams.py`) run on threads, every call for a bounded time (`pipes.py`).
"""

from __future__ import annotations

import struct

MAGIC = b"FBST"
REQUEST = struct.Struct("<4s16sII32sQ")
REPLY = struct.Struct("<IIQQQ")
OFFER = struct.Struct("<II")
ALL, PLACE, PUSH = range(3)
OK, MISSING, TOO_LARGE, NO_TICKET = range(4)
DECLINED = {"have": 16, "full": 17, "namespace": 18, "corrupt": 19, "busy": 20, "io": 21}
"""Status of a push that isn't taken, by the reason."""
WHY = {status: reason for reason, status in DECLINED.items()}
PIECE_BYTES = 1 << 20
"""What is received, and verified, at a time. It has to come within a peer's `stall_s`."""
NAMESPACE_BYTES_MAX = 1 << 20
