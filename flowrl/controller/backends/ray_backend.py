"""Ray backend: runs one host (process with workers) per slot of the placement, as a Ray actor."""

import contextlib
import logging
import os
import signal
import time
import uuid
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pickle import PicklingError
from typing import Any, Literal

import ray
import ray._private.state as ray_state
import ray._private.worker as ray_worker
from ray.core.generated.common_pb2 import WorkerExitType  # pyright: ignore[reportAttributeAccessIssue] (generated at run time)
from ray.core.generated.gcs_pb2 import WorkerTableData  # pyright: ignore[reportAttributeAccessIssue] (as above)
from ray.exceptions import (
    ActorDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    TaskCancelledError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flowrl.config.base import Device
from flowrl.controller.backends.base import RAY_LOGGER, Clock
from flowrl.controller.backends.local_ray import find_local_end
from flowrl.controller.backends.ray_nodes import RayNodes, interface_of
from flowrl.controller.errors import FlowError, ProcessLost, WorkerError, describe_unpicklable
from flowrl.controller.host.fork_server import fork_server, survive_fork_server
from flowrl.controller.host.host import ReplaceableHost
from flowrl.controller.host.process_end import ProcessEnds, count_oom_kills
from flowrl.controller.host.process_probe import (
    StackDump,
    collect_stack_dumps,
    enable_stack_dumps,
    find_workers,
    kill_processes,
    read_start_time,
)
from flowrl.controller.placement.plan import FailureGroup, Inventory, PoolPlan, Slot
from flowrl.controller.wire import Construction, RecoveryPlan, Report, Request, decode, encode
from flowrl.data.batch.block import Ref
from flowrl.data.batch.payload import Payload
from flowrl.data.folders.private_folder import set_temporary_folder, temporary_folder

_LOOPBACK = "127.0.0.1"
_PRINT_RAY_MESSAGE = ray_worker.print_to_stdstream
_STACKS_TIMEOUT_S = 10.0
_MEMORY_KILL = "Ray's memory monitor killed its process, because the node ran out of memory"
_EXIT_TYPE_TIMEOUT_S = 1.0


class _RayHost(ReplaceableHost):
    """A host (process with workers) as a Ray actor."""

    def __init__(self, name: str, folder: str | None, followers: Sequence[Mapping[str, Any]], *gpus: int | str) -> None:
        """Args:
        name: unique name of the process.
        folder: folder for temporary files on a local Ray. None on a cluster.
        followers: Ray's options for the processes on the other nodes of a replica.
        gpus: ids of the GPUs that the process uses in addition to the one that Ray has assigned.
        """
        super().__init__(_read_objects)
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, [*ray.get_gpu_ids(), *gpus]))
        if folder is not None:
            set_temporary_folder(folder)
        # On Ctrl-C, a terminal sends SIGINT to all processes. Only the driver handles the signal.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Ray's handler of SIGTERM would cancel queued calls without a retry. The default handler only ends the process.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        survive_fork_server(name)
        # Inputs are in read-only shared memory. `Host` rejects methods that write to an input.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        enable_stack_dumps(name)
        self.address = _LOOPBACK if folder is not None else ray.util.get_node_ip_address()
        self.followers = [_RayFollower(options) for options in followers]
        _use_interface_of(self.address)

    def live(self) -> None:
        """Returns None, which shows that the process is alive and idle."""

    def open_rendezvous(self, name: str, world_size: int, node: int, kind: str) -> tuple[Any, Report]:
        """Opens the rendezvous of a failure group (processes that fail together). Called on the first rank."""
        return self.join(name, (self.address, 0), 0, world_size, node, kind)

    def call_encoded(self, encoded: Any, *objects: Any) -> tuple[Any, Any]:  # Any: bytes or the value
        request, plan = decode(encoded)
        value, report = self.call_after_recovery(request, plan, *objects)
        return encode(value) if isinstance(value, Payload) else value, encode(report)


def _use_interface_of(address: str) -> None:
    """Makes gloo and NCCL use the network interface with this address.

    By default, gloo uses the interface of the host name and NCCL the first one, which others may not reach.
    """
    if device := interface_of(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", device)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={device}")  # without "=", it is a prefix of names


class _RayFollower:
    """A process on another node of a replica, as a Ray task. Ray ends it with the host that started it."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options

    def run(self, function: Callable[..., object], *arguments: object) -> Callable[[], object]:
        task = ray.remote(max_retries=0, max_calls=1)(_run_on_node).options(**self._options)
        ref = task.remote((function, arguments))

        def wait() -> object:
            try:
                return ray.get(ref)
            except RayTaskError as error:
                raise error.cause from None
            except RayError as error:
                raise RuntimeError(_why_ended(error)) from None

        return wait


def _run_on_node(call: tuple[Callable[..., object], tuple]) -> object:
    """Calls a function with the IP address of this node and with its arguments."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a host
    function, arguments = call
    address = ray.util.get_node_ip_address()
    _use_interface_of(address)
    return function(address, *arguments)


class RayRef:
    def __init__(self, ref: ray.ObjectRef, origin: tuple[str, int, int, str], encoded: bool = False) -> None:
        self.ref = ref
        self.origin = origin
        self._encoded = encoded

    @property
    def carrier(self) -> "RayRef":
        return self

    def get(self) -> Any:  # Any: whatever the method returned
        _raise_if_ray_ended(*self.origin)
        try:
            return self.read(ray.get(self.ref))
        except RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, FlowError) else self._failure(error)) from None
        except RayError as error:
            raise self._failure(error) from None

    def read(self, stored: Any) -> Any:  # Any: as above
        return decode(stored) if self._encoded else stored

    def get_with(self, others: Sequence[Ref]) -> list[Any]:
        return [self.get(), *(other.get() for other in others)]

    def done(self) -> bool:
        return find_local_end() is not None or bool(ray.wait([self.ref], timeout=0, fetch_local=False)[0])

    def _failure(self, error: Exception) -> WorkerError:
        role, rank, node, method = self.origin
        if isinstance(error, RayActorError | OutOfMemoryError | TaskCancelledError):
            # Ray cancels the queued calls of a process that ends by itself.
            lost = ProcessLost(role, rank, node, method, _why_ended(error))
            lost.is_replaceable = not isinstance(error, ActorDiedError)
            lost.is_sender_known = isinstance(error, OutOfMemoryError)
            return lost
        if isinstance(error, RayTaskError) and isinstance(error.cause, TypeError | PicklingError | AttributeError):
            # A method raises only WorkerErrors, so this error comes from pickling its result.
            return WorkerError(role, rank, node, method, describe_unpicklable(error.cause))
        return WorkerError(role, rank, node, method, f"{type(error).__name__}: {error}")


def _raise_if_ray_ended(role: str, rank: int, node: int, method: str) -> None:
    """Raises ProcessLost if the local Ray has ended. Without its raylet, most functions of Ray would end the driver."""
    if (cause := find_local_end()) is not None:
        raise ProcessLost(role, rank, node, method, cause)


def _why_ended(error: RayError) -> str:
    """Returns Ray's reason for the end of a process, as an error message."""
    text = str(error)
    if isinstance(error, OutOfMemoryError):
        return _MEMORY_KILL
    if "its node has died" in text:
        return "its node is lost"
    if "creation task" in text:
        return f"its process could not start: {text.strip().splitlines()[-1]}"
    return "its process was killed or crashed (exit code unknown)"


def _is_memory_kill(process_id: int) -> bool:
    """Returns whether Ray's memory monitor has killed a worker process. Waits until Ray has recorded its end."""
    deadline = time.monotonic() + _EXIT_TYPE_TIMEOUT_S
    while time.monotonic() < deadline and find_local_end() is None:
        table = map(WorkerTableData.FromString, ray_state.state._connect_and_get_accessor().get_worker_table())
        worker = next((worker for worker in table if worker.pid == process_id), None)
        if worker is None or not worker.is_alive:
            return worker is not None and worker.exit_type == WorkerExitType.NODE_OUT_OF_MEMORY
        time.sleep(0.02)
    return False


def _log_ray_message(data: Mapping[str, Any], ignore_prefix: bool) -> None:  # Any: as Ray calls it
    """Logs a message of Ray's processes. Ray would print it on the terminal, in color."""
    for line in data["lines"]:
        logging.getLogger(RAY_LOGGER).info(line)


class Liveness:
    """Watches worker processes on this machine."""

    def __init__(self) -> None:
        self._alive: dict[str, tuple[int, float]] = {}
        """Name -> process id and start time, because the id of an ended process may be reused."""

    def find_ended(self, names: Collection[str]) -> list[str]:
        """Returns the names of processes that have ended since the previous check."""
        ended = [
            name
            for name, (process_id, started_s) in self._alive.items()
            if name in names and read_start_time(process_id) != started_s
        ]
        for name in ended:
            del self._alive[name]
        # A search scans all processes of the machine, so search only unknown names.
        unknown = [name for name in names if name not in self._alive]
        for name, worker in (find_workers(unknown) if unknown else {}).items():
            self._alive[name] = worker.process_id, worker.started_s
        return ended


class RayBackend:
    """Runs hosts as Ray actors on a local Ray, or on the cluster at `address`."""

    is_remote = True
    clock: Clock = time

    def __init__(
        self,
        address: str | None,
        notify: Callable[[str], None],
        prepare: tuple[str, ...] = (),
        fork_workers: bool | Literal["auto"] = "auto",
    ) -> None:
        """`prepare` lists modules that the fork server imports. `fork_workers` is that of `Cluster`."""
        self._prepare, self._fork_workers = prepare, fork_workers
        self._hosts: dict[tuple[str, int], Any] = {}  # Any: ray.actor.ActorHandle, whose methods Ray does not type
        self._methods: dict[
            tuple[str, int, bool], Any
        ] = {}  # Any: as above; cached because creating a method handle costs as much as a call
        self._names: dict[tuple[str, int], str] = {}
        self._all_names: set[str] = set()
        """Names of all processes that this backend has started, including those that it has ended."""
        self._uses_fork_server = False
        self._ends = ProcessEnds(count_oom_kills())
        self._nodes = RayNodes(address, notify=notify, ends=self._ends)
        ray_worker.print_to_stdstream = _log_ray_message  # Ray has no setting for it
        self._liveness = Liveness()
        self._killed: set[int] = set()
        """Ids of the processes that this backend has killed."""
        self._memory_kills: dict[int, bool] = {}
        """Ids of ended processes, and whether Ray's memory monitor has killed them."""

    def inventory(self, device: Device, devices: Sequence[int] | None) -> Inventory:
        return self._nodes.inventory(device, devices)

    def count_usable_cpus(self, nodes: Collection[int]) -> Mapping[int, int]:
        return self._nodes.count_usable_cpus(nodes)

    def reserve(self, pools: Sequence[PoolPlan], kind: str) -> None:
        if self._forks(kind):
            fork_server(self._prepare)  # starts it early: its imports run while Ray starts
        self._nodes.connect(sum(len(pool.slots) for pool in pools))
        for pool in pools:
            self._nodes.reserve(pool, kind)

    def _forks(self, kind: str) -> bool:
        """Returns whether the fork server starts the processes, which is possible only on this machine."""
        is_forking = kind == "cpu" if self._fork_workers == "auto" else self._fork_workers
        return bool(is_forking) and self._nodes.address is None

    @property
    def _has_exit_codes(self) -> bool:
        """Whether the fork server has started the processes. If it has exited, Python starts them instead."""
        return self._uses_fork_server and fork_server().is_running

    def start_hosts(self, group: FailureGroup, kind: str, *, restarts: int) -> None:
        _raise_if_ray_ended(group.name, 0, group.slots[0].node, "start")
        self._uses_fork_server = self._forks(kind)
        forked = {"runtime_env": {"py_executable": fork_server().py_executable}} if self._uses_fork_server else {}
        for slot in group.slots:
            if slot.device < 0:
                # The task worker uses no device.
                on_driver_node = self._nodes.on_driver_node()
                options = {"num_cpus": 0, "scheduling_strategy": on_driver_node}
            else:
                options = self._device_options(slot, kind)
            self._add_host(slot, kind, restarts, options | forked)

    def _device_options(self, slot: Slot, kind: str) -> dict[str, Any]:
        """Returns Ray's resources and scheduling for the process of a slot, without the devices of its followers."""
        count = slot.num_devices
        devices = {"num_gpus": count, "num_cpus": 0} if kind == "cuda" else {"num_cpus": count}
        return {"scheduling_strategy": self._nodes.bundle(slot), **devices}

    def _add_host(self, slot: Slot, kind: str, restarts: int, options: dict[str, Any]) -> None:
        key = slot.pool, slot.rank
        self._names[key] = f"flowrl-{uuid.uuid4().hex}"
        self._all_names.add(self._names[key])
        # Calls that are submitted while a replacement starts wait for it. Without retries as the actor's default, Ray
        # fails these calls immediately and retries them after 1, 2, 4, 8 and 16 seconds.
        retries = -1 if restarts else 0
        actor = ray.remote(_RayHost).options(max_restarts=restarts, max_task_retries=retries, **options)
        folder = str(temporary_folder()) if self._nodes.address is None else None
        followers = [self._device_options(follower, kind) for follower in slot.followers]
        gpus = self._find_shared_gpus(slot) if kind == "cuda" else ()
        self._hosts[key] = host = actor.remote(self._names[key], folder, followers, *gpus)
        # With task retries, Ray sends a call again to the replacement process.
        for is_resent in (False, True):
            retries = {"num_returns": 2, "max_task_retries": -1 if is_resent else 0}
            self._methods[(*key, is_resent)] = host.call_encoded.options(**retries)

    def _find_shared_gpus(self, slot: Slot) -> list[ray.ObjectRef]:
        """Returns a reference to the id of each GPU of a slot except for the first, if other processes share them.

        Ray assigns a process a fraction of only one GPU. For each other GPU, a short task therefore takes the same
        fraction of that GPU and returns its id.
        """
        if slot.num_devices >= 1:
            return []
        options = [
            {"num_gpus": slot.num_devices, "num_cpus": 0, "scheduling_strategy": self._nodes.bundle(own)}
            for own in (replace(slot, device=device) for device in slot.other_devices)
        ]
        return [ray.remote(_find_gpu).options(**own).remote() for own in options]

    def join(self, group: FailureGroup, kind: str) -> list[tuple[Slot, Ref]]:
        slots, name = group.slots, group.name
        first = slots[0]
        opening = self._hosts[first.pool, first.rank].open_rendezvous.options(num_returns=2)
        address, opened = opening.remote(name, len(slots), first.node, kind)
        reports: list[tuple[Slot, Ref]] = [(first, RayRef(opened, (name, 0, first.node, "join")))]
        for rank, slot in enumerate(slots):
            joining = self._hosts[slot.pool, slot.rank].join.options(num_returns=2)
            _, report = joining.remote(name, address, rank, len(slots), slot.node, kind)
            reports.append((slot, RayRef(report, (name, rank, slot.node, "join"))))
        return reports

    def open_group(self, slot: Slot, role: str, ranks: Sequence[int], rank: int) -> Ref:
        method = self._hosts[slot.pool, slot.rank].open_group.options(num_returns=2)
        _, report = method.remote(role, tuple(ranks), rank, slot.node)
        return RayRef(report, (role, rank, slot.node, "join"))

    def construct(
        self, slot: Slot, construction: Construction, plan: RecoveryPlan | None, after: Sequence[Ref] = ()
    ) -> Ref:
        _raise_if_ray_ended(construction.role, construction.rank, slot.node, "__init__")
        method = self._hosts[slot.pool, slot.rank].construct_once
        method = method.options(num_returns=2, max_task_retries=-1 if plan else 0)
        _, report = method.remote(construction, *map(_object_ref, after))
        return RayRef(report, (construction.role, construction.rank, slot.node, "__init__"))

    def evict(self, slot: Slot, role: str, rank: int, *, replaceable: bool) -> Ref:
        method = self._hosts[slot.pool, slot.rank].evict
        method = method.options(num_returns=2, max_task_retries=-1 if replaceable else 0)
        _, report = method.remote(role, rank, slot.node)
        return RayRef(report, (role, rank, slot.node, "evict"))

    def call(self, slot: Slot, request: Request, refs: Sequence[Ref], plan: RecoveryPlan | None) -> tuple[Ref, Ref]:
        _raise_if_ray_ended(request.role, request.rank, slot.node, request.method)
        objects = [_object_ref(ref) for ref in refs]
        if (slot.pool, slot.rank) not in self._hosts:
            raise ProcessLost(request.role, request.rank, slot.node, request.method, "its process has been ended")
        method = self._methods[slot.pool, slot.rank, plan is not None and request.contract.resend]
        value, report = method.remote(encode((request, plan)), *objects)
        origin = (request.role, request.rank, slot.node, request.method)
        return RayRef(value, origin, encoded=request.returns_batch), RayRef(report, origin, encoded=True)

    def share(self, payload: Payload) -> Ref:
        _raise_if_ray_ended("driver", 0, 0, "put")
        return RayRef(ray.put(payload), ("driver", 0, 0, "put"))

    def wait(self, refs: Sequence[Ref], count: int, timeout_s: float) -> list[Ref]:
        if find_local_end() is not None:
            return list(refs)
        by_object = {_object_ref(ref): ref for ref in refs}
        ready, _ = ray.wait(list(by_object), num_returns=count, timeout=timeout_s, fetch_local=False)
        return [by_object[ref] for ref in ready]

    def get(self, refs: Sequence[Ref]) -> list[Any]:
        for ref in refs[:1]:
            _raise_if_ray_ended(*_ray_ref(ref).origin)
        try:
            stored = ray.get([_object_ref(ref) for ref in refs])
            return [_ray_ref(ref).read(value) for ref, value in zip(refs, stored, strict=True)]
        except RayError:
            return [ref.get() for ref in refs]

    def probe(self, slot: Slot) -> Ref:
        return RayRef(self._hosts[slot.pool, slot.rank].live.remote(), (slot.pool, slot.rank, slot.node, "live"))

    def stacks(self, slots: Sequence[Slot]) -> Mapping[Slot, StackDump]:
        by_node: defaultdict[str, dict[str, Slot]] = defaultdict(dict)
        for slot in slots:
            by_node[self._nodes.id_of(slot)][self._names[slot.pool, slot.rank]] = slot
        here = ray.get_runtime_context().get_node_id()
        remote_dumps = {}
        for node in set(by_node) - {here}:
            on_node = NodeAffinitySchedulingStrategy(node, soft=False)
            task = ray.remote(num_cpus=0)(collect_stack_dumps).options(scheduling_strategy=on_node)
            remote_dumps[node] = task.remote(list(by_node[node]))
        dumps = {here: collect_stack_dumps(list(by_node[here]))} if here in by_node else {}
        for node, ref in remote_dumps.items():
            with contextlib.suppress(RayError):
                dumps[node] = ray.get(ref, timeout=_STACKS_TIMEOUT_S)
        return {by_node[node][name]: dump for node, own in dumps.items() for name, dump in own.items()}

    def restart(self, slot: Slot, process_id: int | None) -> None:
        # Ray waits for the process to end itself, which a stopped or busy process cannot do. It restarts killed ones.
        is_local = self._is_local(slot)
        killed = kill_processes([self._names[slot.pool, slot.rank]], process_id) if is_local else set()
        self._killed |= killed
        if not killed and not (is_local and process_id is not None):
            ray.kill(self._hosts[slot.pool, slot.rank], no_restart=False)

    def _is_local(self, slot: Slot) -> bool:
        return self._nodes.id_of(slot) == ray.get_runtime_context().get_node_id()

    def restore(self, slot: Slot, plan: RecoveryPlan) -> Ref:
        # Ray sends the calls of one caller in the order of submission, so a task is the caller.
        on_driver_node = self._nodes.on_driver_node()
        restoring = ray.remote(num_cpus=0)(_restore).options(scheduling_strategy=on_driver_node)
        restored = restoring.remote(self._hosts[slot.pool, slot.rank], plan)
        return RayRef(restored, (slot.pool, slot.rank, slot.node, "restore"))

    def describe_end(self, slot: Slot) -> str | None:
        name = self._names.get((slot.pool, slot.rank))
        if name is None or not self._has_exit_codes or (end := fork_server().find_exit(name)) is None:
            return None
        process_id, status = end
        now_s, is_own_kill, exit_code = time.monotonic(), process_id in self._killed, os.waitstatus_to_exitcode(status)
        self._ends.record_oom_kills(count_oom_kills(), now_s)
        if process_id not in self._memory_kills:
            is_sender_unknown = exit_code in (-signal.SIGTERM, -signal.SIGKILL) and not is_own_kill
            self._memory_kills[process_id] = is_sender_unknown and _is_memory_kill(process_id)
        if self._memory_kills[process_id]:
            return _MEMORY_KILL
        return self._ends.describe((name, process_id), exit_code, now_s=now_s, is_own_kill=is_own_kill)

    def lost_processes(self, slots: Sequence[Slot]) -> list[Slot]:
        self._ends.record_oom_kills(count_oom_kills(), time.monotonic())
        names = {self._names[key]: slot for slot in slots if (key := (slot.pool, slot.rank)) in self._hosts}
        local = {name: slot for name, slot in names.items() if self._is_local(slot)}
        # The fork server also knows processes that ended before the first check.
        find_ended = fork_server().find_ended if self._has_exit_codes else self._liveness.find_ended
        return [local[name] for name in find_ended(local)]

    def lost_nodes(self) -> Mapping[int, str]:
        return self._nodes.lost()

    def end_pool(self, name: str) -> None:
        for key in [key for key in self._hosts if key[0] == name]:
            for is_resent in (False, True):
                del self._methods[(*key, is_resent)]
            ray.kill(self._hosts.pop(key), no_restart=True)

    def close(self) -> None:
        if not self._nodes.is_local:
            for name in {pool for pool, _ in self._hosts}:
                self.end_pool(name)
        self._nodes.close()
        kill_processes(self._all_names)  # a stopped process (SIGSTOP) has not noticed that Ray has ended
        ray_worker.print_to_stdstream = _PRINT_RAY_MESSAGE


def _restore(host: Any, plan: RecoveryPlan) -> None:  # Any: an actor handle, as in `RayBackend`
    """Runs on a worker of Ray. A failure is raised by the next call of the driver, which restores the workers too."""
    with contextlib.suppress(RayError):
        ray.get(host.restore.options(max_task_retries=-1).remote(plan))


def _find_gpu() -> int | str:
    return ray.get_gpu_ids()[0]


def _read_objects(refs: Sequence[Ref]) -> list[Any]:  # Any: payloads and results
    return ray.get([_object_ref(ref) for ref in refs])


def _object_ref(ref: Ref) -> ray.ObjectRef:
    return _ray_ref(ref).ref


def _ray_ref(ref: Ref) -> RayRef:
    assert isinstance(ref, RayRef), f"a {type(ref).__name__} cannot be sent by reference"
    return ref
