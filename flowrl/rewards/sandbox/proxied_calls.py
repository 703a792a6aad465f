"""Calls between the process of tests and the process of the tested code, as JSON lines over a socket.

The tests run in one sandbox and the tested code in another. The tests see only plain values and proxies of the tested
code, so it can neither read expected values nor replace their comparison.
"""

import builtins
import importlib
import json
import socket
import sys
from itertools import islice
from typing import Any

_MAX_LINE = 8 * 1024**2
_MAX_ITEMS = 100_000
_PLAIN = (type(None), bool, int, str)


class CallError(Exception):
    """Raised in the tests if the tested code raises an exception without a builtin type."""


# The process of the tested code.


def serve(settings: dict[str, Any], descriptor: int) -> int:
    """Runs the tested code, and then executes the requests of the tests."""
    names: dict[str, Any] = {"__name__": "solution"}
    exec(compile(settings["code"], "solution.py", "exec"), names)
    objects: list[Any] = []
    with socket.socket(fileno=descriptor) as connection, connection.makefile("rwb") as stream:
        for line in stream:
            try:
                request = json.loads(line)
                response = {"value": _respond(request, names, objects)}
                if request["op"] == "call":
                    response = response["value"]
            except BaseException as error:  # noqa: BLE001 (reported to the tests, also SystemExit)
                response = {"error": type(error).__name__, "message": str(error)[:1000]}
            stream.write(json.dumps(response).encode() + b"\n")
            stream.flush()
    return 0


def _respond(request: dict[str, Any], names: dict[str, Any], objects: list[Any]) -> Any:
    def encode(value: Any) -> Any:
        return _encode(value, objects)

    def decode(value: Any) -> Any:
        return _decode(value, objects.__getitem__)

    match request["op"]:
        case "names":
            return [
                [name, callable(value), None if callable(value) else encode(value)]
                for name, value in names.items()
                if name[0] != "_"
            ]
        case "name":
            return encode(names[request["name"]])
        case "attribute":
            return encode(getattr(objects[request["target"]], request["name"]))
        case "items":
            return encode(list(islice(objects[request["target"]], _MAX_ITEMS)))
        case "call":
            target = names[request["name"]] if "name" in request else objects[request["target"]]
            arguments = [decode(value) for value in request["arguments"]]
            options = {name: decode(value) for name, value in request["options"].items()}
            value = target(*arguments, **options)
            return {"value": encode(value), "arguments": [encode(argument) for argument in arguments]}
    raise ValueError(request["op"])


def _encode(value: Any, objects: list[Any] | None) -> Any:
    """Returns a value as JSON. Objects other than plain data are added to `objects`, and their index is sent."""

    def encode_all(values: Any) -> list[Any]:
        return [_encode(item, objects) for item in values]

    match value:
        case None | bool() | int() | str():
            return value
        case Proxy():
            return {"object": value._target}
        case float() | complex():
            return {"float" if isinstance(value, float) else "complex": repr(value)}
        case list() | tuple() | set() | frozenset():
            kind = next(kind for kind in (list, tuple, set, frozenset) if isinstance(value, kind))
            return {kind.__name__: encode_all(value)}
        case dict():
            return {"dict": [encode_all(item) for item in value.items()]}
        case bytes():
            return {"bytes": value.hex()}
    if type(value).__module__ == "numpy":
        return _encode(value.tolist(), objects)
    if objects is None:
        raise TypeError(f"a {type(value).__name__} cannot be sent to the tested code: use plain data")
    objects.append(value)
    return {"object": len(objects) - 1}


def _decode(value: Any, find: Any) -> Any:
    if not isinstance(value, dict):
        if not isinstance(value, _PLAIN):
            raise TypeError("malformed value")
        return value
    ((name, content),) = value.items()
    match name:
        case "float":
            return float(content)
        case "complex":
            return complex(content)
        case "bytes":
            return bytes.fromhex(content)
        case "dict":
            return {_decode(key, find): _decode(item, find) for key, item in content}
        case "object":
            return find(content)
        case "list" | "tuple" | "set" | "frozenset":
            return getattr(builtins, name)(_decode(item, find) for item in content)
    raise TypeError("malformed value")


# The process of the tests.


class Proxy:
    """An object of the tested code. Supports attributes, calls and iteration. Two proxies are never equal."""

    def __init__(self, client: "Client", target: Any) -> None:
        self._client, self._target = client, target

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._client.request(op="attribute", target=self._target, name=name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._client.call({"target": self._target}, arguments, options)

    def __iter__(self) -> Any:
        return iter(self._client.request(op="items", target=self._target))

    def __next__(self) -> Any:
        return self._client.request(op="attribute", target=self._target, name="__next__")()


class Client:
    """Sends requests to the tested code."""

    def __init__(self, connection: socket.socket) -> None:
        self._stream = connection.makefile("rwb")

    def request(self, **fields: Any) -> Any:
        return self._decode(self._send(fields)["value"])

    def call(self, target: dict[str, Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Calls a function of the tested code, and applies its changes of lists, dicts and sets to the arguments."""
        sent = [_encode(argument, None) for argument in arguments]
        named = {name: _encode(value, None) for name, value in options.items()}
        response = self._send({"op": "call", **target, "arguments": sent, "options": named})
        for argument, before, after in zip(arguments, sent, response["arguments"], strict=True):
            if before != after:
                _replace(argument, self._decode(after))
        return self._decode(response["value"])

    def names(self) -> list[Any]:
        return self._send({"op": "names"})["value"]

    def _decode(self, value: Any) -> Any:
        return _decode(value, lambda target: Proxy(self, int(target)))

    def _send(self, fields: dict[str, Any]) -> dict[str, Any]:
        self._stream.write(json.dumps(fields).encode() + b"\n")
        self._stream.flush()
        line = self._stream.readline(_MAX_LINE)
        if not line.endswith(b"\n"):
            raise ConnectionError("the tested code ended, or its result is too large")
        response = json.loads(line)
        if "error" in response:
            kind = getattr(builtins, str(response["error"]), CallError)
            is_exception = isinstance(kind, type) and issubclass(kind, Exception)
            raise (kind if is_exception else CallError)(str(response["message"]))
        return response


def _replace(argument: Any, value: Any) -> None:
    if type(argument) is not type(value):
        return
    if isinstance(argument, list):
        argument[:] = value
    elif isinstance(argument, dict | set):
        argument.clear()
        argument.update(value)


def check(settings: dict[str, Any], descriptor: int) -> int:
    """Runs a test. Returns 0 if it raises no exception."""
    with socket.socket(fileno=descriptor) as connection:
        client = Client(connection)
        names: dict[str, Any] = {"__name__": "tests"}  # Any: values of the tests and proxies
        entry_point = settings["entry_point"]
        for name, is_callable, value in client.names():
            if name == entry_point or (entry_point is None and not hasattr(builtins, name)):
                names[name] = _import_module(name) if name in _MODULES else None
                if names[name] is None:
                    names[name] = _Function(client, name) if is_callable else client._decode(value)
        names["to_json"] = _to_json
        exec(compile(settings["code"], "test.py", "exec"), names)
        test_function = names.get("check")
        if entry_point is not None and test_function is not None:
            test_function(names[entry_point])
    return 0


def _to_json(value: Any) -> Any:
    """Returns tuples as lists, so that results can be compared with values of JSON."""
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _to_json(item) for key, item in value.items()}
    return value


_MODULES = {name: name for name in (*sys.stdlib_module_names, "numpy")} | {"np": "numpy"}
"""Names in the tested code that the tests import themselves, so that the code cannot replace their functions."""


def _import_module(name: str) -> Any:  # Any: a module, or None
    try:
        return importlib.import_module(_MODULES[name])
    except ImportError:
        return None


class _Function(Proxy):
    """A function or class of the tested code by its name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._client.request(op="name", name=self._target), name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._client.call({"name": self._target}, arguments, options)
