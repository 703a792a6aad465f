"""A recipe for run_multinode.sh that prints its environment as a line of JSON and waits to be ended."""

import json
import os
import sys
import time

import psutil


def main() -> None:
    token = os.environ["RAY_AUTH_TOKEN"]
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    facts = {
        "process": os.getpid(),
        "arguments": sys.argv[1:],
        "token_is_seen": any(token in line for line in lines),
        "num_raylets": sum(f"--gcs-address={sys.argv[-1]}" in line and "/raylet/raylet" in line for line in lines),
    }
    sys.stdout.write(f"{json.dumps(facts)}\n")
    sys.stdout.flush()
    time.sleep(100)


if __name__ == "__main__":
    main()
