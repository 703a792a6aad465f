"""What the driver keeps of one call on one rank."""

from dataclasses import dataclass

from flowrl.controller.errors import FlowError, WorkerError
from flowrl.controller.host.host import Report
from flowrl.controller.placement.plan import Slot
from flowrl.data.batch.block import Ref


@dataclass(eq=False)
class CallRecord:
    """One call on one rank, from its submission until the driver has read its report."""

    number: int
    report_ref: Ref
    role: str
    rank: int
    method: str
    slot: Slot
    device: str
    submitted_ns: int
    timeout_s: float | None
    inputs: tuple["CallRecord", ...] = ()
    """The calls whose results it reads, until it is settled."""
    running_since_s: float | None = None
    """When nothing was before it any more, on the monotonic clock; None until then."""
    start_timeout_s: float | None = None
    """Seconds that a process may take to become what a lost one was, before it comes to the call."""
    starting_since_s: float | None = None
    resend: bool = True
    """Whether it is made again where its process is lost and replaced."""
    gives_state: bool = False
    """Whether the calls after it see what it gives its worker (`replay`)."""
    symptom: WorkerError | None = None
    """It lost the connection to a rank that failed; what that rank did is not known yet."""
    report: Report | None = None
    error: FlowError | None = None

    @property
    def settled(self) -> bool:
        return self.report is not None or self.error is not None
