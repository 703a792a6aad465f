"""The Ray backend: one actor process per device. With ray_nodes.py the only module that imports ray."""

import contextlib
import os
import signal
import time
import uuid
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pickle import PicklingError
from typing import Any

import ray
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flowrl.config.base import Device
from flowrl.controller.backends.ray_nodes import RayNodes, interface_of
from flowrl.controller.calls.wire import Request, decode, encode
from flowrl.controller.errors import FlowError, ProcessLost, WorkerError, describe_unpicklable
from flowrl.controller.failures.process_probe import Liveness, StackDump, collect_stack_dumps, enable_stack_dumps
from flowrl.controller.failures.recovery import RecoveryPlan
from flowrl.controller.host.fork_server import fork_server
from flowrl.controller.host.host import Construction, Host, Report
from flowrl.controller.placement.plan import HostSet, Inventory, PoolPlan, Slot
from flowrl.data.batch.block import Ref
from flowrl.data.batch.payload import Payload

_LOOPBACK = "127.0.0.1"
_STACKS_TIMEOUT_S = 10.0


class _RayHost(Host):
    """A host in a process of its own."""

    def __init__(self, name: str, loopback: bool) -> None:
        super().__init__()
        # A terminal sends Ctrl-C to every process in it; how a run ends is for its driver to say.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Objects are read from shared memory that is not writable; `Host` checks that no method writes, so torch need
        # not say.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        enable_stack_dumps(name)
        self.address = _LOOPBACK if loopback else ray.util.get_node_ip_address()
        # Left alone, gloo takes the interface that the host's name stands for, which may be none that others reach.
        if device := interface_of(self.address):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", device)

    def live(self) -> None:
        """Says that this process lives."""

    def open_rendezvous(self, name: str, world_size: int, node: int, kind: str) -> tuple[Any, Report]:
        """Opens the rendezvous of a host set on this host, its first rank."""
        return self.join(name, (self.address, 0), 0, world_size, node, kind)

    def answer(self, encoded: Any, *objects: Any) -> tuple[Any, Any]:  # Any: what `encode` makes
        """As `call`, request and answer in the form in which they travel."""
        request, plan = decode(encoded)
        value, report = self.call(request, plan, *objects)
        return encode(value) if isinstance(value, Payload) else value, encode(report)

    def call(self, request: Request, plan: RecoveryPlan | None, *objects: Any) -> tuple[Any, Report]:
        """As `Host.call`, in a process that may have taken a lost one's place."""
        lost = plan is not None and self.lacks(plan.constructions)
        if plan is not None:
            self.recover(plan, request.role)
        value, report = super().call(request, *objects)
        return value, replace(report, revived=True) if lost else report

    def construct(self, made: Construction, *after: Any) -> tuple[None, Report]:  # Any: reports
        """As `Host.construct`, made again where the process was lost: a call that came first has made the worker."""
        if self.lacks([made]):
            return super().construct(made, *after)
        now_ns = time.time_ns()
        return None, Report(now_ns, now_ns, now_ns, now_ns)

    def recover(self, plan: RecoveryPlan, role: str) -> None:
        """Makes the workers that the process lacks, and gives the role the state that its call expects."""
        lacking = [made for made in plan.constructions if self.lacks([made])]
        self.replaced = self.replaced or bool(lacking)
        self.settle_states(plan.attempt_start_id)
        # A state that was given after the call was submitted is undone: by the one before it, or, where there is none,
        # with all that came of it.
        ahead = self.is_ahead(role, plan.requests)
        undone = ahead and not self.replaces(role, plan.requests)
        for made in [*lacking, *(made for made in plan.constructions if made.role == role and undone)]:
            super().construct(made)
        if ahead or self.is_behind(role, plan.requests):
            for state, refs in plan.replay_log:
                if state.role == role:
                    super().call(state, *ray.get([_object_ref(ref) for ref in refs]))


class RayRef:
    """A reference into the object store."""

    def __init__(self, ref: ray.ObjectRef, what: tuple[str, int, int, str], encoded: bool = False) -> None:
        self.ref = ref
        self._what = what
        self._encoded = encoded

    @property
    def carrier(self) -> "RayRef":
        return self

    def get(self) -> Any:  # Any: whatever the method returned
        try:
            return self.read(ray.get(self.ref))
        except RayTaskError as error:
            cause = error.cause
            raise (cause if isinstance(cause, FlowError) else self._failure(error)) from None
        except RayError as error:
            raise self._failure(error) from None

    def read(self, stored: Any) -> Any:  # Any: as above
        """The value behind what the object store has."""
        return decode(stored) if self._encoded else stored

    def get_with(self, others: Sequence[Ref]) -> list[Any]:
        return [self.get(), *(other.get() for other in others)]

    def done(self) -> bool:
        return bool(ray.wait([self.ref], timeout=0, fetch_local=False)[0])

    def _failure(self, error: Exception) -> WorkerError:
        role, rank, node, method = self._what
        if isinstance(error, RayActorError | OutOfMemoryError):
            # Which call it was that met the dead process says nothing of why it died.
            lost = ProcessLost(role, rank, node, method, _why_ended(error))
            lost.is_replaceable = not isinstance(error, ActorDiedError)
            return lost
        if isinstance(error, RayTaskError) and isinstance(error.cause, TypeError | PicklingError | AttributeError):
            # Whatever the method itself raises comes as a WorkerError: this was raised when its result was stored.
            return WorkerError(role, rank, node, method, describe_unpicklable(error.cause))
        return WorkerError(role, rank, node, method, f"{type(error).__name__}: {error}")


def _why_ended(error: RayError) -> str:
    """What Ray knows of a process's end, in a sentence."""
    text = str(error)
    if isinstance(error, OutOfMemoryError):
        return "its process was ended because its node ran out of memory"
    if "its node has died" in text:
        return "its node is gone"
    if "creation task" in text:
        return f"its process could not start: {text.strip().splitlines()[-1]}"
    return "its process has ended: it was killed, perhaps for lack of memory, or it crashed"


class RayBackend:
    """Hosts as Ray actors, on a Ray of this run's own or on the cluster at `address`."""

    def __init__(self, address: str | None, say: Callable[[str], None]) -> None:
        self._hosts: dict[tuple[str, int], Any] = {}  # Any: ray.actor.ActorHandle, whose methods Ray does not type
        self._methods: dict[tuple[str, int, bool], Any] = {}  # Any: as above; each costs as much as a call
        self._names: dict[tuple[str, int], str] = {}
        self._nodes = RayNodes(address, say=say)
        self._liveness = Liveness()

    def inventory(self, device: Device, devices: Sequence[int] | None) -> Inventory:
        return self._nodes.inventory(device, devices)

    def reserve(self, pools: Sequence[PoolPlan], kind: str) -> None:
        if self._forks(kind):
            fork_server()  # it imports while Ray starts
        self._nodes.connect(sum(len(pool.slots) for pool in pools))
        for pool in pools:
            self._nodes.reserve(pool, kind)

    def _forks(self, kind: str) -> bool:
        """Whether processes are forked: not on other machines, nor those that use GPUs, which survive no fork once an
        import has looked at them."""
        return self._nodes.address is None and kind == "cpu"

    def start_hosts(self, hosts: HostSet, kind: str, *, restarts: int) -> None:
        forked = {"runtime_env": {"py_executable": fork_server().py_executable}} if self._forks(kind) else {}
        for slot in hosts.slots:
            count = slot.devices
            devices = {"num_gpus": count, "num_cpus": 0} if kind == "cuda" else {"num_cpus": count}
            if slot.device < 0:
                # It takes part of no device's time worth counting.
                beside = self._nodes.beside_driver()
                self._add_host(slot, restarts, {"num_cpus": 0, "scheduling_strategy": beside, **forked})
            else:
                self._add_host(slot, restarts, {"scheduling_strategy": self._nodes.bundle(slot), **devices, **forked})

    def _add_host(self, slot: Slot, restarts: int, options: dict[str, Any]) -> None:
        key = slot.pool, slot.rank
        self._names[key] = f"flowrl-{uuid.uuid4().hex}"
        made = ray.remote(_RayHost).options(max_restarts=restarts, **options)
        self._hosts[key] = host = made.remote(self._names[key], self._nodes.address is None)
        # A call whose process is lost is made again on the one that takes its place, if its state can be brought back.
        for resent in (False, True):
            retries = {"num_returns": 2, "max_task_retries": -1 if resent else 0}
            self._methods[(*key, resent)] = host.answer.options(**retries)

    def join(self, hosts: HostSet, kind: str) -> list[tuple[Slot, Ref]]:
        slots, name = hosts.slots, hosts.name
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
        method = self._hosts[slot.pool, slot.rank].construct
        method = method.options(num_returns=2, max_task_retries=-1 if plan else 0)
        _, report = method.remote(construction, *map(_object_ref, after))
        return RayRef(report, (construction.role, construction.rank, slot.node, "__init__"))

    def evict(self, slot: Slot, role: str, rank: int, *, replaceable: bool) -> Ref:
        method = self._hosts[slot.pool, slot.rank].evict
        method = method.options(num_returns=2, max_task_retries=-1 if replaceable else 0)
        _, report = method.remote(role, rank, slot.node)
        return RayRef(report, (role, rank, slot.node, "evict"))

    def call(self, slot: Slot, request: Request, refs: Sequence[Ref], plan: RecoveryPlan | None) -> tuple[Ref, Ref]:
        objects = [_object_ref(ref) for ref in refs]
        if (slot.pool, slot.rank) not in self._hosts:
            raise ProcessLost(request.role, request.rank, slot.node, request.method, "its process was ended")
        method = self._methods[slot.pool, slot.rank, plan is not None and request.contract.resend]
        value, report = method.remote(encode((request, plan)), *objects)
        what = (request.role, request.rank, slot.node, request.method)
        return RayRef(value, what, encoded=request.returns_batch), RayRef(report, what, encoded=True)

    def share(self, payload: Payload) -> Ref:
        return RayRef(ray.put(payload), ("driver", 0, 0, "put"))

    def wait(self, refs: Sequence[Ref], count: int, timeout_s: float) -> list[Ref]:
        by_object = {_object_ref(ref): ref for ref in refs}
        ready, _ = ray.wait(list(by_object), num_returns=count, timeout=timeout_s, fetch_local=False)
        return [by_object[ref] for ref in ready]

    def get(self, refs: Sequence[Ref]) -> list[Any]:
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
        asked = {}
        for node in set(by_node) - {here}:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            task = ray.remote(num_cpus=0)(collect_stack_dumps).options(scheduling_strategy=there)
            asked[node] = task.remote(list(by_node[node]))
        dumps = {here: collect_stack_dumps(list(by_node[here]))} if here in by_node else {}
        for node, ref in asked.items():
            with contextlib.suppress(RayError):
                dumps[node] = ray.get(ref, timeout=_STACKS_TIMEOUT_S)
        return {by_node[node][name]: dump for node, found in dumps.items() for name, dump in found.items()}

    def restart(self, slot: Slot) -> None:
        ray.kill(self._hosts[slot.pool, slot.rank], no_restart=False)

    def lost_processes(self, slots: Sequence[Slot]) -> list[Slot]:
        here = ray.get_runtime_context().get_node_id()
        names = {self._names[key]: slot for slot in slots if (key := (slot.pool, slot.rank)) in self._hosts}
        near = {name: slot for name, slot in names.items() if self._nodes.id_of(slot) == here}
        return [near[name] for name in self._liveness.find_ended(near)]

    def lost_nodes(self) -> Mapping[int, str]:
        return self._nodes.lost()

    def end_pool(self, name: str) -> None:
        for key in [key for key in self._hosts if key[0] == name]:
            for resent in (False, True):
                del self._methods[(*key, resent)]
            ray.kill(self._hosts.pop(key), no_restart=True)

    def close(self) -> None:
        if not self._nodes.end_with_run:
            for name in {pool for pool, _ in self._hosts}:
                self.end_pool(name)
        self._nodes.close()


def _object_ref(ref: Ref) -> ray.ObjectRef:
    return _ray_ref(ref).ref


def _ray_ref(ref: Ref) -> RayRef:
    assert isinstance(ref, RayRef), f"a {type(ref).__name__} cannot travel by reference"
    return ref
