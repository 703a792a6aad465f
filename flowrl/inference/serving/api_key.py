"""Reads the key of `flowrl serve`, and requires it for all paths of the server except liveness checks."""

import hmac
import json
import os
import re
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from flowrl.config import UserError
from flowrl.config.source import find_file_problem

API_KEY = "VLLM_API_KEY"
"""Environment variable of the key, both for `flowrl serve` and for vLLM. Other users cannot read the variable."""

LIVENESS_PATHS = frozenset({"/health", "/ping"})
"""Paths that report only whether the server works."""

Event = MutableMapping[str, Any]  # Any: the values of ASGI
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
Application = Callable[[Event, Receive, Send], Awaitable[None]]


def read_api_key(key: str | None, file: Path | None) -> str | None:
    """Returns the key of `--api-key`, of the file of `--api-key-file`, or of the environment variable. Returns None if
    none of them is set.

    Raises UserError if the file cannot be read, or if the key is empty or cannot be sent in a header.
    """
    name = "--api-key"
    if key is None and file is not None:
        name = f"--api-key-file: {file}"
        if problem := find_file_problem(file):
            raise UserError(f"{name} {problem}")
        try:
            key = file.read_bytes().decode("ascii", errors="replace").strip()
        except OSError as error:
            raise UserError(f"{name} cannot be read ({error.strerror}): correct the path") from error
    elif key is None:
        name, key = API_KEY, os.environ.get(API_KEY) or None
    if key is not None and not re.fullmatch(r"[!-~]+", key):
        problem = "has no key" if not key else "has spaces or characters other than ASCII, which headers cannot contain"
        raise UserError(f"{name} {problem}: set a key of ASCII letters, digits and punctuation")
    return key


class KeyMiddleware:
    """ASGI middleware of vLLM's server (`--middleware`) that responds to requests without the key with status 401.

    vLLM itself requires the key only for the paths of its OpenAI interface, and not, for example, for its tokenizer and
    metrics. Liveness checks need no key. Preflight requests of browsers need no key either, because vLLM itself
    responds to them.
    """

    def __init__(self, application: Application) -> None:
        """Reads the key from the environment. Raises KeyError without the variable, and AssertionError if it is empty,
        so that no server starts without a key.
        """
        self._application, self._key = application, os.environ[API_KEY].encode()
        assert self._key

    async def __call__(self, scope: Event, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind not in ("http", "websocket") or self._is_allowed(scope):
            await self._application(scope, receive, send)
        elif kind == "websocket":
            await receive()  # the request to connect, which a close event rejects with status 403
            await send({"type": "websocket.close", "code": 1008, "reason": "the key is missing or wrong"})
        else:
            body = json.dumps({"error": "the key is missing or wrong: send the header Authorization: Bearer KEY"})
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body.encode()})

    def _is_allowed(self, scope: Event) -> bool:
        headers = dict(reversed([*scope["headers"]]))  # of repeated headers, the first
        if scope["type"] == "http":
            is_preflight = {b"origin", b"access-control-request-method"} <= headers.keys()
            if scope["path"] in LIVENESS_PATHS or (scope["method"] == "OPTIONS" and is_preflight):
                return True
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key, self._key)
