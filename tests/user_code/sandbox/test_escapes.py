"""Code that tries to leave its sandbox or to harm the machine."""

import ctypes
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowrl.user_code.sandbox.launch import Sandbox, SandboxLimits, find_missing_protections

FAST = SandboxLimits(timeout_s=3.0)


def needs(*protections: str) -> None:
    """Skips a test if this system does not offer a protection."""
    if missing := set(protections) & set(find_missing_protections()):
        pytest.skip(f"this system does not offer {', '.join(sorted(missing))}")


def run(code: str, limits: SandboxLimits = FAST, stdin: str = "") -> tuple[int, str]:
    """Returns exit code and output of a program."""
    with Sandbox("program", code, limits, stdin=stdin) as sandbox:
        return sandbox.wait(), sandbox.read_output()


def processes_with(marker: str) -> list[str]:
    """Returns the processes whose command line contains a marker."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and marker.encode() in (entry / "cmdline").read_bytes():
                found.append(entry.name)
        except OSError:  # ends meanwhile
            continue
    return found


def wait_for_end(marker: str) -> list[str]:
    """Returns the processes with a marker that are left after a while."""
    for _ in range(100):
        if not (left := processes_with(marker)):
            break
        time.sleep(0.1)
    return left


@pytest.fixture
def marker(request: pytest.FixtureRequest) -> Iterator[str]:
    """A text that no other process has in its command line."""
    text = f"flowrl-marker-{os.getpid()}-{abs(hash(request.node.name))}"
    yield text
    assert wait_for_end(text) == []


# Processes.


def test_a_fork_bomb_ends(marker: str) -> None:
    code = f"""
import os, time
print("started", flush=True)
def bomb():
    while True:
        try:
            if os.fork() == 0:
                open("/proc/self/comm", "w").write("x")
        except OSError:
            time.sleep(0.01)
{marker!r}
bomb()
"""
    needs("descendants")
    assert run(code)[0] in (124, 125)


def test_a_daemon_does_not_survive(marker: str) -> None:
    code = f"""
import os, signal, subprocess, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in range(1, 32):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(1000)", {marker!r}])
    os._exit(0)
time.sleep(0.5)
print("ok")
"""
    assert run(code) == (0, "ok\n")


def test_processes_end_at_the_time_limit(marker: str) -> None:
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'while True: pass', {marker!r}])"
    assert run(code, SandboxLimits(timeout_s=1.0))[0] == 124


def test_processes_end_with_the_process_that_started_the_sandbox(marker: str, tmp_path: Path) -> None:
    needs("descendants")
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'while True: pass', {marker!r}])"
    child = os.fork()
    if child == 0:
        tempfile.tempdir = str(tmp_path)  # the killed process leaves its folder
        Sandbox("program", code, SandboxLimits(timeout_s=100.0))
        time.sleep(1000)
    for _ in range(200):
        if processes_with(marker):
            break
        time.sleep(0.05)
    assert processes_with(marker)
    os.kill(child, 9)
    os.waitpid(child, 0)
    assert wait_for_end(marker) == []


def test_the_parent_cannot_be_killed() -> None:
    needs("signals")
    code = f"""
import os, signal
results = []
for target in ({os.getpid()}, os.getppid(), 1, -1):
    try:
        os.kill(target, signal.SIGKILL if target > 1 else signal.SIGTERM)
        results.append(target)
    except OSError:
        pass
print("alive")
"""
    assert run(code) == (0, "alive\n")  # the first process of a namespace ignores signals without a handler


def test_other_processes_cannot_be_traced() -> None:
    needs("environment")
    code = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for target in ({os.getpid()}, os.getppid(), 1):
    print(libc.ptrace(16, target, 0, 0), end=" ")
    for name in ("mem", "environ", "maps", "fd/0"):
        try:
            print(len(open(f"/proc/{{target}}/{{name}}", "rb").read(10)), end=" ")
        except OSError:
            print("denied", end=" ")
"""
    assert run(code)[1].split() == ["-1", "denied", "denied", "denied", "denied"] * 3


def test_limits_cannot_be_raised() -> None:
    code = """
import resource
for kind in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU, resource.RLIMIT_NOFILE):
    try:
        resource.setrlimit(kind, (-1, -1))
        print(resource.getrlimit(kind))
    except (ValueError, OSError):
        pass
print("done")
"""
    if os.geteuid() == 0:
        needs("environment")  # otherwise the code has the rights of root
    assert run(code)[1] == "done\n"


# Resources.


def test_an_infinite_loop_ends() -> None:
    assert run("while True: pass", SandboxLimits(timeout_s=1.0))[0] in (124, 128 + 9)


def test_sleep_and_ignored_signals_end() -> None:
    code = "import signal, time\nfor n in (1, 2, 3, 15): signal.signal(n, signal.SIG_IGN)\ntime.sleep(1000)"
    assert run(code, SandboxLimits(timeout_s=1.0))[0] == 124


def test_a_memory_bomb_fails() -> None:
    assert run("x = bytearray(8 * 1024**3)\nprint('large')") == (1, "")
    # On a busy machine, the loop needs more than the seconds of `FAST`.
    patient = SandboxLimits(timeout_s=60.0)
    assert run("x = []\nwhile True: x.append(bytearray(1024**2))", patient)[0] in (1, 125)


def test_the_memory_of_all_processes_is_limited() -> None:
    code = """
import os, time
for _ in range(16):
    if os.fork() == 0:
        x = b'x' * (100 * 1024**2)
        time.sleep(1000)
time.sleep(1000)
"""
    limits = SandboxLimits(timeout_s=60.0, memory_mb=400)
    assert run(code, limits)[0] == 125


HIDDEN_MEMORY = {
    "anonymous files": "os.write(os.memfd_create('x'), bytes(2**20))",
    "System V segments": "libc.shmget(0, 2**20, 0o1600) >= 0 or 1 / 0",
    "unmapped pages": "mmap.mmap(-1, 2**20)",
    "the zero device": "mmap.mmap(os.open('/dev/zero', os.O_RDWR), 2**20)",
    "System V semaphores": "libc.semget(0, 1, 0o1600) >= 0 or 1 / 0",
    "keys": "libc.syscall({'x86_64': 248, 'aarch64': 217}[machine], b'user', b'a', b'b', 1, -3) >= 0 or 1 / 0",
    "rings": "libc.syscall(425, 1, ctypes.create_string_buffer(120)) >= 0 or 1 / 0",
    "file systems of a user namespace": "libc.unshare(0x10000000) == 0 or 1 / 0",
    "file systems of a process with a user namespace": (
        "libc.syscall({'x86_64': 56, 'aarch64': 220}[machine], 0x10000011, 0, 0, 0, 0) >= 0 or 1 / 0"
    ),
    "file systems of a process of clone3": (
        "libc.syscall(435, struct.pack('11Q', 0x10000000, 0, 0, 0, 17, *[0] * 6), 88) >= 0 or 1 / 0"
    ),
}


@pytest.mark.parametrize("kind", HIDDEN_MEMORY)
def test_memory_that_is_not_counted_is_denied(kind: str) -> None:
    needs("memory", "reading")
    code = f"""
import ctypes, mmap, os, struct
libc = ctypes.CDLL(None)
machine = os.uname().machine
mmap.mmap(-1, 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
try:
    {HIDDEN_MEMORY[kind]}
    print("allowed")
except (OSError, ArithmeticError):
    print("denied")
"""
    assert run(code) == (0, "denied\n")


def test_huge_output_is_bounded() -> None:
    with Sandbox("program", "while True: print('x' * 1000)", SandboxLimits(timeout_s=10.0, max_file_mb=1)) as sandbox:
        assert sandbox.wait() != 0
        assert len(sandbox.read_output()) <= 1024**2


def test_files_cannot_fill_the_disk() -> None:
    needs("reading")  # the folder of the code is then in memory, with a limit
    code = """
written = 0
try:
    for i in range(100):
        with open(f"{i}", "wb") as file:
            written += file.write(bytes(4 * 1024**2))
except OSError:
    print(written < 100 * 1024**2)
"""
    assert run(code, SandboxLimits(timeout_s=20.0))[1] == "True\n"


# Network and files.


def test_the_network_cannot_be_used() -> None:
    needs("network")
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"""
import socket
for address in (("127.0.0.1", {server.getsockname()[1]}), ("192.0.2.1", 80)):
    try:
        socket.create_connection(address, timeout=1)
        print("connected")
    except OSError:
        print("blocked")
"""
        assert run(code)[1] == "blocked\nblocked\n"
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize("command", ["open({!r}, 'w')", "os.remove({!r})", "os.chmod({!r}, 0)", "os.rename({!r}, 'a')"])
def test_files_outside_cannot_be_changed(command: str, tmp_path: Path) -> None:
    needs("files")
    (tmp_path / "file").write_text("content")
    code = f"import os\ntry:\n    {command.format(str(tmp_path / 'file'))}\nexcept OSError:\n    print('denied')"
    assert run(code)[1] == "denied\n"
    assert (tmp_path / "file").read_text() == "content"


def test_a_symlink_does_not_lead_outside(tmp_path: Path) -> None:
    needs("files")
    (tmp_path / "file").write_text("content")
    code = f"""
import os
os.symlink({str(tmp_path)!r}, "link")
os.symlink("/usr", "usr")
for path in ("link/file", "link/new", "usr/new", "/proc/1/root/new", "/proc/self/cwd/../usr/new"):
    try:
        open(path, "a").write("changed")
        print("written", path)
    except OSError:
        pass
try:
    os.link({str(tmp_path / "file")!r}, "hard")
    print("linked")
except OSError:
    pass
"""
    assert run(code)[1] == ""
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "content"


def test_files_of_the_user_cannot_be_read(tmp_path: Path) -> None:
    needs("reading")
    (tmp_path / "expected.txt").write_text("secret")
    code = f"""
import os
for path in ({str(tmp_path / "expected.txt")!r}, {str(Path(__file__))!r}, "/etc/passwd", "/proc/1/root/etc/passwd"):
    print(os.path.exists(path), end=" ")
"""
    assert run(code)[1].split() == ["False"] * 4


def test_shared_memory_of_the_user_cannot_be_attached() -> None:
    needs("reading")
    libc = ctypes.CDLL(None)
    libc.shmat.restype = ctypes.c_void_p
    segment = libc.shmget(0, 4096, 0o1600)
    try:
        assert libc.shmat(segment, None, 0) != ctypes.c_void_p(-1).value
        code = f"""
import ctypes
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
print(libc.shmat({segment}, None, 0) == ctypes.c_void_p(-1).value, libc.shmctl({segment}, 0, None))
"""
        assert run(code)[1] == "True -1\n"
    finally:
        assert libc.shmctl(segment, 0, None) == 0  # removes it


def test_the_old_root_cannot_be_mounted_again() -> None:
    needs("reading")
    code = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print(libc.mount(b"proc", b"/tmp", b"proc", 0, None), libc.umount2(b"/usr", 2))
print(libc.unshare(0x20000), libc.chroot(b"/tmp"))
"""
    assert run(code)[1].split() == ["-1"] * 4


def test_the_environment_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWRL_TEST_SECRET", "secret")
    code = """
import glob, os
print("FLOWRL_TEST_SECRET" in os.environ)
for path in glob.glob("/proc/[0-9]*/environ"):
    try:
        print(b"FLOWRL_TEST_SECRET" in open(path, "rb").read())
    except OSError:
        pass
"""
    needs("environment")
    assert "True" not in run(code)[1]


def test_no_descriptor_of_the_parent_is_open() -> None:
    code = """
import os
names = [name for name in os.listdir("/proc/self/fd") if int(name) > 2]
print([name for name in names if os.path.exists(f"/proc/self/fd/{name}")])
"""
    assert run(code)[1] == "[]\n"
