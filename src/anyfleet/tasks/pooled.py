"""All data in one place: the task of the centralised reference."""

from dataclasses import dataclass

from anyfleet.arguments import checked
from anyfleet.tasks.specs import TaskSpec
from anyfleet.tasks.task import Task, pooled


@checked
@dataclass(frozen=True)
class Pooled:
    """Another task, with the data of all its devices on a single one."""

    inner: TaskSpec

    def build(self, seed: int) -> Task:
        return pooled(self.inner.build(seed))
