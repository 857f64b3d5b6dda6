"""The steps of a start, a pause and an end, as far as the row tells them. Pure."""

from dataclasses import dataclass

from hosts.models import Volume
from sandboxes.models import Sandbox

State = Sandbox.State


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One step of what a sandbox is doing: `done`, `now` or `next`."""

    label: str
    progress: str


def steps_of(sandbox: Sandbox) -> list[Step]:
    """Return the steps of what the sandbox is doing, in order; none while it rests."""
    match sandbox.state:
        case State.STARTING | State.RESUMING:
            has_disk = sandbox.volume.attached_for == Volume.Purpose.RUN
            return _steps(
                "Room on a host", "Disk attached", "Guest boots", done=2 if has_disk else 1
            )
        case State.PAUSING:
            return _steps("Billing stopped", "Changes are saved", "Asleep", done=1)
        case State.TERMINATING:
            return _steps("Billing stopped", "Guest and disk are taken down", done=1)
        case _:
            return []


def _steps(*labels: str, done: int) -> list[Step]:
    progress = ["done"] * done + ["now"] + ["next"] * len(labels)
    return [
        Step(label=label, progress=state)
        for label, state in zip(labels, progress, strict=False)
    ]
