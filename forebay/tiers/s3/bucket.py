"""What is asked of a bucket: put, read, delete, list. Every call blocks and raises RequestFailed."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Protocol

from forebay.tiers.s3.failures import Kind, RequestFailed
from forebay.tiers.s3.objects import NixlObjects
from forebay.tiers.s3.requests import Requests

READ_BYTES = 512 << 10
SEND_WHOLE_BYTES = 5 << 20
SEND_BYTES = 1 << 20
DELETE_BATCH = 500


class Sink(Protocol):
    """Where the bytes of an answer go. Each method may raise GivenUp to end the request."""

    def begin(self, length: int, modified: float) -> None:
        """An answer of `length` bytes begins, of an object of that age; what an earlier attempt brought is void."""

    def take(self, data: bytes) -> None:
        """The next bytes."""


class GivenUp(Exception):  # no error: nobody waits for the answer any more
    """Raised by a Sink."""


@dataclass(frozen=True, slots=True)
class Front:
    """The first bytes of an object, and how long all of it is."""

    data: bytes
    size: int
    modified: float


@dataclass(frozen=True, slots=True)
class Listed:
    """One object of a listing; `modified` is the service's Unix time."""

    name: str
    size: int
    modified: float


class _Pieces(io.BytesIO):
    """A body that is sent in pieces of a MiB: each has to be on its way in time, not all of it."""

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(-1 if size is None or size < 0 else max(size, SEND_BYTES))


class Bucket:
    """Objects of one bucket. `conditional` and `batch_delete` are what the endpoint can do, found out at the start
    and on the way."""

    def __init__(self, client: Any, bucket: str, requests: Requests, timeout_s: float) -> None:
        self._client = client
        self._bucket = bucket
        self._timeout_s = timeout_s
        self.requests = requests
        self.engine: NixlObjects | None = None
        """What brings and takes bytes instead of the client, where it can."""
        self.conditional = False
        self.batch_delete = True

    def put(self, name: str, body: bytes, *, fresh: bool = False) -> None:
        """Store an object. With `fresh`, and where the endpoint can, an object that is there already stays: EXISTS."""
        given: bytes | _Pieces = body if len(body) <= SEND_WHOLE_BYTES else _Pieces(body)
        condition = {"IfNoneMatch": "*"} if fresh and self.conditional else {}

        tries = 0

        def request() -> None:
            nonlocal tries
            tries += 1
            if not condition and self._put_by_engine(name, body):
                return
            if isinstance(given, _Pieces):
                given.seek(0)
            self._client.put_object(Bucket=self._bucket, Key=name, Body=given, **condition)

        try:
            self.requests.run("put", request)
        except RequestFailed as failure:
            if failure.kind is not Kind.EXISTS or tries == 1:
                raise
            # The first try has done it, and only its answer was lost.
        self.requests.metrics.moved(sent=len(body))

    def _put_by_engine(self, name: str, body: bytes) -> bool:
        """False if it is still to be done. Raises RequestFailed if that can't be told."""
        if self.engine is None:
            return False
        pieces = 1 + len(body) // SEND_BYTES
        stored = self.engine.put(name, body, self.requests.clock() + pieces * self._timeout_s)
        if stored is None:
            raise RequestFailed(Kind.BROKEN, "no answer in time (NIXL)", maybe_done=True)
        return stored

    def front(self, name: str, length: int, until: float | None = None) -> Front:
        """The first `length` bytes, or all if there are fewer."""

        def request() -> Front:
            answer = self._client.get_object(Bucket=self._bucket, Key=name, Range=f"bytes=0-{length - 1}")
            with answer["Body"] as body:
                data = body.read(length + 1)
            if len(data) > length or int(answer["ContentLength"]) > length:
                raise RequestFailed(Kind.OTHER, "the endpoint doesn't keep to ranges")
            return Front(data, _whole(answer), answer["LastModified"].timestamp())

        front = self.requests.run("front", request, until)
        self.requests.metrics.moved(received=len(front.data))
        return front

    def read(
        self, name: str, sink: Sink, part: tuple[int, int] | None, until: float, *, known: int = 0
    ) -> None:
        """All of an object, or the `part` (offset, length) of it, into `sink`, at the latest `until`. `known` is how
        long that is, if it is of our own storing: its age isn't told then."""
        wanted = {} if part is None else {"Range": f"bytes={part[0]}-{part[0] + part[1] - 1}"}

        def request() -> None:
            if known and self._read_by_engine(name, sink, part[0] if part else 0, known, until):
                return
            answer = self._client.get_object(Bucket=self._bucket, Key=name, **wanted)
            body = answer["Body"]
            try:
                sink.begin(int(answer["ContentLength"]), answer["LastModified"].timestamp())
                self._copy(body, sink, int(answer["ContentLength"]), until)
            except BaseException:
                body.close()  # what is still to come would be taken for the next answer
                raise

        self.requests.run("get", request, until)

    def _read_by_engine(self, name: str, sink: Sink, offset: int, length: int, until: float) -> bool:
        """False if it is still to be read."""
        if self.engine is None:
            return False
        data = self.engine.get(name, offset, length, min(until, self.requests.clock() + self._timeout_s))
        if data is None:
            return False
        self.requests.metrics.moved(received=length)
        sink.begin(length, 0.0)
        sink.take(bytes(data))
        return True

    def _copy(self, body: Any, sink: Sink, length: int, until: float) -> None:
        left = length
        while left:
            body.set_socket_timeout(max(0.001, min(self._timeout_s, until - self.requests.clock())))
            data = body.read(min(READ_BYTES, left))
            if not data:
                raise RequestFailed(Kind.BROKEN, "the answer ended too early")
            self.requests.metrics.moved(received=len(data))
            sink.take(data)
            left -= len(data)
        if body.read(1):  # at the end the connection goes back to where others find it
            raise RequestFailed(Kind.OTHER, "the answer is longer than it says")

    def delete(self, names: Sequence[str]) -> list[str]:
        """Remove objects; returns the names that may still be there."""
        left: list[str] = []
        for at in range(0, len(names), DELETE_BATCH):
            some = names[at : at + DELETE_BATCH]
            left += self._delete_batch(some) if self.batch_delete and len(some) > 1 else self._delete_each(some)
        return left

    def _delete_batch(self, names: Sequence[str]) -> list[str]:
        wanted = {"Objects": [{"Key": name} for name in names], "Quiet": True}
        try:
            answer = self.requests.run(
                "delete", lambda: self._client.delete_objects(Bucket=self._bucket, Delete=wanted)
            )
        except RequestFailed as failure:
            if failure.kind.answered or failure.kind is Kind.REFUSED:  # this endpoint doesn't do that
                self.batch_delete = False
                return self._delete_each(names)
            return list(names)
        return [str(error.get("Key")) for error in answer.get("Errors", ()) if error.get("Code") != "NoSuchKey"]

    def _delete_each(self, names: Sequence[str]) -> list[str]:
        left = []
        for number, name in enumerate(names):
            try:
                self.requests.run("delete", lambda key=name: self._client.delete_object(Bucket=self._bucket, Key=key))  # type: ignore[misc]
            except RequestFailed as failure:
                if failure.kind is Kind.MISSING:
                    continue
                left.append(name)
                if not failure.kind.answered:
                    return left + list(names[number + 1 :])
        return left

    def listing(self, prefix: str, after: str = "") -> Iterator[list[Listed]]:
        """Pages of what is below `prefix`, in the order of their names, behind `after`. Each step is a request."""
        position: dict[str, Any] = {"StartAfter": after} if after else {}
        while True:
            answer = self.requests.run(
                "list",
                lambda p=position: self._client.list_objects_v2(Bucket=self._bucket, Prefix=prefix, **p),  # type: ignore[misc]
            )
            yield [
                Listed(str(found["Key"]), int(found["Size"]), found["LastModified"].timestamp())
                for found in answer.get("Contents", ())
            ]
            token = answer.get("NextContinuationToken")
            if not answer.get("IsTruncated") or not token:
                return
            position = {"ContinuationToken": token}

    def now(self) -> float:
        """The service's Unix time, in whole seconds; ours where it doesn't tell."""
        answer = self.requests.run(
            "list", lambda: self._client.list_objects_v2(Bucket=self._bucket, Prefix="-", MaxKeys=1)
        )
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        return (parsedate_to_datetime(date) if date else datetime.now(UTC)).timestamp()


def _whole(answer: dict[str, Any]) -> int:
    """Length of the whole object from an answer to a ranged request."""
    _, _, size = str(answer.get("ContentRange") or "").rpartition("/")
    return int(size) if size.isdecimal() else int(answer["ContentLength"])
