"""One small HTTP question to a process of ours, whatever proxies the environment names."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from typing import Any


def status_of(url: str, body: Any = None, timeout_s: float = 2.0) -> tuple[int, bytes]:
    """Status and body of a GET, or of a POST with this body as JSON. Raises OSError if nobody answers in time."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        if body is None:
            connection.request("GET", parts.path)
        else:
            connection.request("POST", parts.path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read(1 << 16)
    except http.client.HTTPException as error:
        raise ConnectionError(f"{url}: {error}") from error
    finally:
        connection.close()
