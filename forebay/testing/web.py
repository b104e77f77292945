"""Requests to servers of this machine, without TLS.

A client of httpx reads all certificates that the machine trusts when it is made, also for http://: 20 ms of a core,
which a test that asks again and again takes from the very servers that it waits for.
"""

from __future__ import annotations

import ssl
from functools import partial

import httpx

NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

get = partial(httpx.get, verify=NO_CERTIFICATES)
post = partial(httpx.post, verify=NO_CERTIFICATES)
stream = partial(httpx.stream, verify=NO_CERTIFICATES)
