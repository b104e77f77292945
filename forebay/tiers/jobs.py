"""The daemon's account of the jobs that a tier process holds, bounded in bytes for stores and loads apart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["store", "load"]


@dataclass(frozen=True, slots=True)
class Job:
    """One job in the process's hands. `overdue_at`: by then a living tier has answered."""

    id: int
    kind: Kind
    length: int
    overdue_at: float


@dataclass
class JobTable:
    """Open jobs and their bytes. `limits` caps the bytes of each kind; at least one job always fits."""

    limits: dict[Kind, int]
    open: dict[int, Job] = field(default_factory=dict)
    bytes: dict[Kind, int] = field(default_factory=lambda: {"store": 0, "load": 0})

    def add(self, job: Job) -> bool:
        """Note a job. False if its kind's budget is used up."""
        assert job.id not in self.open, f"job id {job.id} is in use"
        used = self.bytes[job.kind]
        if used and used + job.length > self.limits[job.kind]:
            return False
        self.open[job.id] = job
        self.bytes[job.kind] = used + job.length
        return True

    def finish(self, job_id: int) -> Job | None:
        """Forget a job that is finished; None if it isn't known."""
        job = self.open.pop(job_id, None)
        if job is not None:
            self.bytes[job.kind] -= job.length
            assert self.bytes[job.kind] >= 0
        return job

    def take_all(self) -> list[Job]:
        """Forget all jobs and return them."""
        jobs = list(self.open.values())
        self.open.clear()
        self.bytes = {"store": 0, "load": 0}
        return jobs

    def overdue(self, now: float) -> Job | None:
        """A job that a living tier would have answered by now, if there is one."""
        # Jobs are noted roughly in the order in which they fall due; a scan of some hundreds costs nothing.
        return next((job for job in self.open.values() if now > job.overdue_at), None)
