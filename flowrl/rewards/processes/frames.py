"""Frames of JSON with a length, over a byte stream. They are checked, because user code can write to the stream."""

import json
from collections.abc import Iterator
from typing import Any

_HEAD = 4
"""Bytes of the length, in network byte order."""


class FrameError(ValueError):
    """Raised if the bytes are not a frame."""


def encode_frame(message: dict[str, Any]) -> bytes:  # Any: values of JSON
    """Returns the bytes of a message. Raises TypeError or ValueError if a value has no JSON."""
    return make_frame(encode_json(message))


def make_frame(payload: bytes) -> bytes:
    """Returns the frame of an encoded message."""
    return len(payload).to_bytes(_HEAD, "big") + payload


def encode_json(value: Any) -> bytes:  # Any: values of JSON, arrays and scalars
    """Returns the JSON of a value. Raises TypeError or ValueError if it has none."""
    return json.dumps(value, default=_plain).encode()


def _plain(value: Any) -> Any:  # Any: arrays and scalars of NumPy and torch
    """Returns an array or a scalar as lists and numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} cannot be sent to another process")


class FrameReader:
    """Splits a stream into messages. Buffers at most one frame of `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yields the messages that are complete. Raises FrameError for anything but a JSON object."""
        self._buffer += data
        while len(self._buffer) >= _HEAD:
            length = int.from_bytes(self._buffer[:_HEAD], "big")
            if length > self._max_bytes:
                raise FrameError(f"a frame has {length} bytes, but at most {self._max_bytes} are allowed")
            if len(self._buffer) < _HEAD + length:
                return
            payload = bytes(self._buffer[_HEAD : _HEAD + length])
            del self._buffer[: _HEAD + length]
            try:
                message = json.loads(payload)
            except (ValueError, RecursionError) as error:
                raise FrameError("a frame is not JSON") from error
            if not isinstance(message, dict):
                raise FrameError("a frame is not a JSON object")
            yield message
