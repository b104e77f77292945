"""What can go wrong with a request, in the few kinds that are treated differently, in words without secrets.

Texts of the library's exceptions aren't passed on: they may quote URLs, headers or key ids. A failure says the kind,
the service's error code and the HTTP status, and nothing else that came from outside.
"""

from __future__ import annotations

import http.client
import re
from enum import Enum

from forebay.errors import ForebayError

_CODE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MISSING = {"NoSuchKey", "404", "NotFound"}
_NO_BUCKET = {"NoSuchBucket"}
_EXISTS = {"PreconditionFailed", "ConditionalRequestConflict", "412", "409"}
_REFUSED = {
    "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken",
    "TokenRefreshRequired", "AllAccessDisabled", "RequestTimeTooSkewed", "AuthorizationHeaderMalformed", "401", "403",
}  # fmt: skip
_BUSY = {
    "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests", "RequestLimitExceeded", "ServiceUnavailable",
    "InternalError", "RequestTimeout", "429", "500", "502", "503", "504", "408",
}  # fmt: skip
_UNSUPPORTED = {"NotImplemented", "MethodNotAllowed", "501", "405", "XNotImplemented"}


class Kind(Enum):
    """What a failure means for whoever asked."""

    MISSING = "missing"
    EXISTS = "exists"
    RANGE = "range"
    NO_BUCKET = "no_bucket"
    REFUSED = "refused"
    UNSUPPORTED = "unsupported"
    BUSY = "busy"
    UNREACHABLE = "unreachable"
    BROKEN = "broken"
    OPEN = "open"
    OTHER = "other"

    @property
    def answered(self) -> bool:
        """Did the service do its work, though the answer is no?"""
        return self in (Kind.MISSING, Kind.EXISTS, Kind.RANGE, Kind.UNSUPPORTED, Kind.OTHER)

    @property
    def passing(self) -> bool:
        """May the same request succeed a moment later?"""
        return self in (Kind.BUSY, Kind.UNREACHABLE, Kind.BROKEN)


class RequestFailed(ForebayError):
    """A request didn't do what it was to do. `maybe_done` says that it may have all the same."""

    def __init__(self, kind: Kind, text: str, *, maybe_done: bool = False) -> None:
        super().__init__(text)
        self.kind = kind
        self.maybe_done = maybe_done


def failure_of(error: BaseException) -> RequestFailed | None:
    """The failure that an exception of the library stands for; None for one that isn't about a request."""
    import urllib3.exceptions
    from botocore import exceptions as boto

    if isinstance(error, RequestFailed):
        return error
    if isinstance(error, boto.ClientError):
        return _answered(error)
    what = type(error).__name__
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError | boto.CredentialRetrievalError):
        return RequestFailed(Kind.REFUSED, "the AWS chain has no usable credentials")
    if isinstance(error, boto.ReadTimeoutError | boto.ResponseStreamingError | boto.IncompleteReadError):
        return RequestFailed(Kind.BROKEN, f"the answer stopped ({what})", maybe_done=True)
    unreachable = (
        boto.ConnectTimeoutError, boto.EndpointConnectionError, boto.SSLError, boto.ProxyConnectionError,
    )  # fmt: skip
    if isinstance(error, unreachable):
        return RequestFailed(Kind.UNREACHABLE, f"no connection ({what})")
    broken = (boto.HTTPClientError, urllib3.exceptions.HTTPError, http.client.HTTPException, OSError)
    if isinstance(error, broken):
        return RequestFailed(Kind.BROKEN, f"the connection broke ({what})", maybe_done=True)
    if isinstance(error, boto.BotoCoreError):
        return RequestFailed(Kind.OTHER, f"the request can't be made ({what})")
    return _parser_failure(error)


def _parser_failure(error: BaseException) -> RequestFailed | None:
    from botocore.parsers import ResponseParserError

    if isinstance(error, ResponseParserError):
        return RequestFailed(Kind.BROKEN, "the answer can't be read", maybe_done=True)
    return None


def _answered(error: object) -> RequestFailed:
    response = getattr(error, "response", {})
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)
    code = str(response.get("Error", {}).get("Code") or "")
    code = code if _CODE.fullmatch(code) else "?"
    kind = _kind(code, status)
    return RequestFailed(kind, f"the service answered {code}, status {status}", maybe_done=status >= 500)


def _kind(code: str, status: int) -> Kind:
    if code in _NO_BUCKET:
        return Kind.NO_BUCKET
    if code in _UNSUPPORTED or status in (405, 501):
        return Kind.UNSUPPORTED
    if code in _MISSING or status == 404:
        return Kind.MISSING
    if code in _EXISTS or status == 412:
        return Kind.EXISTS
    if code == "InvalidRange" or status == 416:
        return Kind.RANGE
    if code in _REFUSED or status in (401, 403):
        return Kind.REFUSED
    if code in _BUSY or status >= 500 or status == 429:
        return Kind.BUSY
    return Kind.OTHER
