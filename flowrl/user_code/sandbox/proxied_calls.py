"""Calls between the process of tests and the process of the tested code, as messages of JSON over a socket.

The tests run in one sandbox and the tested code in another. The code controls its whole process, so the process of the
tests trusts no response: it accepts only public names, plain values with builtin types, and references to objects. The
code therefore cannot replace the comparisons of the tests. It sees only the arguments of its calls.
"""

import builtins
import contextlib
import importlib
import json
import sys
import types
from collections.abc import Iterator
from itertools import islice
from multiprocessing.connection import Connection
from typing import Any

_MAX_BYTES = 8 * 1024**2
_MAX_ITEMS = 100_000
_PLAIN = (type(None), bool, int, str)


class CallError(Exception):
    """Raised in the tests if the tested code raises an error that is no `Exception`, such as SystemExit."""


class IterationEnd(RuntimeError):
    """Raised in the tests if the tested code raises StopIteration, which would silently end a loop of the tests."""


# The process of the tested code.


def serve(settings: dict[str, Any], descriptor: int) -> int:
    """Runs the tested code, and then executes the requests of the tests."""
    names: dict[str, Any] = {"__name__": "solution"}
    exec(compile(settings["code"], "solution.py", "exec"), names)
    objects: list[Any] = []
    with Connection(descriptor) as connection, contextlib.suppress(EOFError):
        while True:
            text = connection.recv_bytes()
            try:
                request = json.loads(text)
                response = {"value": _respond(request, names, objects)}
                if request["op"] == "call":
                    response = response["value"]
            except BaseException as error:  # noqa: BLE001 (reported to the tests, also SystemExit)
                kind = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
                response = {"error": kind.__name__, "message": str(error)[:1000]}
            connection.send_bytes(json.dumps(response).encode())
    return 0


def _respond(request: dict[str, Any], names: dict[str, Any], objects: list[Any]) -> Any:
    def find(target: str | int) -> Any:
        return names[target] if isinstance(target, str) else objects[target]

    def encode(value: Any) -> Any:
        return _encode(value, objects)

    match request["op"]:
        case "names":
            return encode([(name, callable(value)) for name, value in names.items()])
        case "value":
            return encode(find(request["target"]))
        case "attribute":
            return encode(getattr(find(request["target"]), request["name"]))
        case "items":
            return encode(list(islice(find(request["target"]), _MAX_ITEMS)))
        case "call":
            arguments = [_decode(value, find) for value in request["arguments"]]
            options = {name: _decode(value, find) for name, value in request["options"].items()}
            value = find(request["target"])(*arguments, **options)
            return {"value": encode(value), "arguments": [encode(argument) for argument in arguments]}
    raise ValueError(request["op"])


def _encode(value: Any, objects: list[Any] | None) -> Any:
    """Returns a value as JSON. Objects other than plain data are added to `objects`, and their index is sent."""

    def encode_all(values: Any) -> list[Any]:
        return [_encode(item, objects) for item in values]

    match value:
        case None | bool() | str():
            return value
        case int() | float() | complex():
            return _encode_number(value)
        case Proxy():
            return {"object": value._target}
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


def _encode_number(value: complex) -> Any:
    """Returns a number as JSON. A subclass of a builtin type may have its own representation, which is not used."""
    if isinstance(value, int):  # the number of decimal digits is limited
        return int(value) if value.bit_length() < 64 else {"int": hex(value)}
    return {"float": repr(float(value))} if isinstance(value, float) else {"complex": repr(complex(value))}


def _decode(value: Any, find: Any) -> Any:
    if not isinstance(value, dict):
        if not isinstance(value, _PLAIN):
            raise TypeError("malformed value")
        return value
    ((name, content),) = value.items()
    match name:
        case "int":
            return int(content, 16)
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
    """An object of the tested code. Supports attributes, calls and iteration. Two proxies are never equal.

    The target is the name of a global variable of the code, or the index of an object that the code has returned.
    """

    def __init__(self, client: "Client", target: str | int) -> None:
        self._client, self._target = client, target

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._client.request(op="attribute", target=self._target, name=name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._client.call(self._target, arguments, options)

    def __iter__(self) -> Any:
        return iter(self._client.request(op="items", target=self._target))

    def __next__(self) -> Any:
        try:
            return self._client.request(op="attribute", target=self._target, name="__next__")()
        except IterationEnd:
            raise StopIteration from None


class _Module(Proxy):
    """A global variable of the tested code with the name of a module. The attributes are those of the real module.

    The code therefore cannot replace functions of the module. Its own function of this name can be called.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(_MODULES[str(self._target)]), name)


class Client:
    """Sends requests to the tested code."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def request(self, **fields: Any) -> Any:
        return self._decode(self._send(fields)["value"])

    def call(self, target: str | int, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Calls a function of the tested code, and applies its changes of lists, dicts and sets to the arguments."""
        sent = [_encode(argument, None) for argument in arguments]
        named = {name: _encode(value, None) for name, value in options.items()}
        response = self._send({"op": "call", "target": target, "arguments": sent, "options": named})
        for argument, before, after in zip(arguments, sent, response["arguments"], strict=True):
            if before != after:
                _replace(argument, self._decode(after))
        return self._decode(response["value"])

    def _decode(self, value: Any) -> Any:
        return _decode(value, lambda target: Proxy(self, int(target)))

    def _send(self, fields: dict[str, Any]) -> dict[str, Any]:
        self._connection.send_bytes(json.dumps(fields).encode())
        try:
            text = self._connection.recv_bytes(_MAX_BYTES)  # closes the connection after a larger response
        except (EOFError, OSError) as error:
            raise ConnectionError("the tested code ended, or its result is too large") from error
        response = json.loads(text)
        if "error" in response:
            kind = getattr(builtins, str(response["error"]), None)
            if not isinstance(kind, type) or not issubclass(kind, Exception):
                kind = CallError
            elif issubclass(kind, StopIteration | StopAsyncIteration):
                kind = IterationEnd
            raise kind(str(response["message"]))
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
    entry_point = settings["entry_point"]
    with Connection(descriptor) as connection:
        client = Client(connection)
        code = compile(settings["code"], "test.py", "exec")
        used = set(_find_names(code))
        names: dict[str, Any] = {}  # Any: values of the tests and proxies
        for name, is_callable in client.request(op="names"):
            if name == entry_point:
                names[name] = Proxy(client, name)
            elif entry_point is None and not name.startswith("_") and not hasattr(builtins, name):
                if name in _MODULES:
                    names[name] = _Module(client, name)
                elif is_callable:
                    names[name] = Proxy(client, name)
                elif name in used:  # a value, which may be large
                    names[name] = client.request(op="value", target=name)
        candidate = None if entry_point is None else names[entry_point]
        # Set last, because names from the code of the response must not replace them.
        names |= {"__name__": "tests", "__builtins__": builtins, "_to_json": _to_json}
        exec(code, names)
        test_function = names.get("check")
        if candidate is not None and test_function not in (None, candidate):
            test_function(candidate)
    return 0


def _find_names(code: types.CodeType) -> Iterator[str]:
    """Yields the names of the global variables and attributes in compiled code."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _find_names(constant)


def _to_json(value: Any) -> Any:
    """Returns tuples as lists, so that results can be compared with values of JSON."""
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _to_json(item) for key, item in value.items()}
    return value


_MODULES = {name: name for name in (*sys.stdlib_module_names, "numpy")} | {"np": "numpy"}
"""Name of a global variable -> the module whose attributes the tests use instead of those of the tested code."""
