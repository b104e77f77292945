"""Errors as OpenAI's clients expect them."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """A request that ends in an HTTP error. `param` names the field that is wrong."""

    def __init__(
        self, status: int, message: str, *, kind: str = "invalid_request_error", param: str | None = None,
        code: str | None = None, headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The JSON that goes out."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


def bad(message: str, param: str | None = None) -> ApiError:
    """400."""
    return ApiError(400, message, param=param)


def busy(message: str, retry_after_s: int) -> ApiError:
    """429 with Retry-After."""
    headers = {"Retry-After": str(retry_after_s)}
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", headers=headers)


def missing_key(message: str) -> ApiError:
    """401."""
    headers = {"WWW-Authenticate": "Bearer"}
    return ApiError(401, message, kind="authentication_error", code="invalid_api_key", headers=headers)


def unavailable(message: str) -> ApiError:
    """503."""
    return ApiError(503, message, kind="server_error", code="no_worker", headers={"Retry-After": "1"})
