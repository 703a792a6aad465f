"""The main loop of a process that returns the values of its calls, or misbehaves."""

import json
import os
import signal
from typing import NoReturn

from flowrl.user_code.guard import ProcessContext
from tests.user_code.scored_functions import wait_for_service


def serve(context: ProcessContext) -> NoReturn:
    """Runs the main loop of the process."""
    while True:
        value = json.loads(context.channel.recv_bytes())["value"]
        if value == "exit":
            os._exit(3)
        elif value == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif value == "hang":
            wait_for_service("")
        elif value == "junk":
            os.write(context.channel.fileno(), b"\xff" * 64)
            wait_for_service("")
        context.channel.send_bytes(json.dumps({"kind": "result", "value": value}).encode())
