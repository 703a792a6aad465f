"""Health checks: find problems of a run in the metrics of its last steps.

Entry points: `HealthMonitor` (monitor: checks each step), `CHECKS` (health_checks: the checks, pure functions of a
window of steps), `Finding` and `read_findings` (monitor: the file `health.jsonl` of a run folder).
May import `flowrl.config` and `flowrl.data`.
"""

from flowrl.health.monitor import Finding, read_findings

__all__ = ["Finding", "read_findings"]
