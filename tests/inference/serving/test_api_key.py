"""The key of `flowrl serve`: where it is read, and which requests need it."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from flowrl.inference.serving.api_key import API_KEY, Event, KeyMiddleware, Receive, Send, read_api_key
from tests.errors import rejects

BEARER = {"authorization": "Bearer secret"}


async def serve_all(scope: Event, receive: Receive, send: Send) -> None:
    """An application that accepts every request."""
    await send({"type": "http.response.start" if scope["type"] == "http" else "websocket.accept", "status": 200})


def request(path: str, headers: Mapping[str, str] | None = None, **scope: Any) -> list[Event]:
    """Returns the events of the response to a request."""
    events: list[Event] = []

    async def receive() -> Event:
        return {"type": "websocket.connect"}

    async def send(event: Event) -> None:
        events.append(event)

    pairs = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    application = KeyMiddleware(serve_all)
    asyncio.run(application({"type": "http", "method": "GET", "path": path, "headers": pairs} | scope, receive, send))
    return events


def status(path: str, headers: Mapping[str, str] | None = None, **scope: Any) -> int:
    return request(path, headers, **scope)[0]["status"]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY, "secret")


PATHS = ("/", "/v1/models", "/tokenize", "/invocations", "/metrics", "/load", "/openapi.json", "/health/", "//health")


@pytest.mark.parametrize("path", PATHS)
def test_paths_need_the_key(path: str) -> None:
    assert status(path) == 401
    assert status(path, BEARER) == 200
    assert status(path, method="OPTIONS") == 401


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_the_paths_of_liveness_need_no_key(path: str) -> None:
    assert status(path) == 200
    assert request(path, type="websocket")[0]["type"] == "websocket.close"


WRONG = ("Bearer wrong", "Bearer ", "Bearer secret2", "Bearer  secret", "Basic secret", "secret")


@pytest.mark.parametrize("value", WRONG)
def test_another_key_is_rejected(value: str) -> None:
    assert status("/v1/models", {"authorization": value}) == 401


def test_the_scheme_has_any_case() -> None:
    assert status("/v1/models", {"authorization": "bearer secret"}) == 200


def test_a_preflight_request_of_a_browser_needs_no_key() -> None:
    preflight = {"origin": "http://example.com", "access-control-request-method": "POST"}
    assert status("/v1/models", preflight, method="OPTIONS") == 200
    assert status("/v1/models", preflight, method="POST") == 401


def test_a_websocket_needs_the_key() -> None:
    assert [event["type"] for event in request("/v1/realtime", type="websocket")] == ["websocket.close"]
    assert request("/v1/realtime", BEARER, type="websocket")[0]["type"] == "websocket.accept"


def test_events_of_the_server_itself_pass() -> None:
    assert request("", type="lifespan") != []


def test_no_server_starts_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(API_KEY)
    with pytest.raises(KeyError):
        KeyMiddleware(serve_all)


def test_the_key_is_read_from_the_option_the_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    file.write_text("of-file\n")
    assert read_api_key("of-option", None) == "of-option"
    assert read_api_key(None, file) == "of-file"
    assert read_api_key(None, None) == "secret"
    monkeypatch.setenv(API_KEY, "")
    assert read_api_key(None, None) is None
    monkeypatch.delenv(API_KEY)
    assert read_api_key(None, None) is None


@pytest.mark.parametrize("content", ["", "\n", "two words", "schlüssel"])
def test_an_invalid_key_is_rejected_and_not_printed(content: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(content)
    with rejects("--api-key-file", file) as caught:
        read_api_key(None, file)
    assert not content.strip() or content not in str(caught.value)
    with rejects("--api-key"):
        read_api_key(content, None)


def test_an_unreadable_file_is_rejected(tmp_path: Path) -> None:
    with rejects("--api-key-file", tmp_path / "none"):
        read_api_key(None, tmp_path / "none")
