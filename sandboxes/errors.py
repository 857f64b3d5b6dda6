"""Why a request about a sandbox is refused."""

from common.errors import Refused, Unavailable


class WrongState(Refused):
    code = "conflict"

    def __init__(self, state: str, wanted: str) -> None:
        super().__init__(state, wanted)
        self.state = state
        self.wanted = wanted

    def __str__(self) -> str:
        return f"A sandbox that is {self.state} cannot become {self.wanted}."


class QuotaExceeded(Refused):
    """Answered with 429."""

    code = "quota_exceeded"
    status = 429

    def __init__(self, dimension: str, limit: int) -> None:
        super().__init__(dimension, limit)
        self.dimension = dimension
        self.limit = limit

    def __str__(self) -> str:
        kind = "running" if self.dimension == "active_sandboxes" else "paused"
        return (
            f"This team may have {self.limit} {kind} sandboxes, and has them. "
            "An operator of the platform can raise the limit."
        )


class TemplateNotFound(Refused):
    code = "not_found"
    status = 404

    def __init__(self, template_id: str) -> None:
        super().__init__(template_id)
        self.template_id = template_id

    def __str__(self) -> str:
        return f"No template {self.template_id!r}."


class TemplateNotReady(Refused):
    code = "template_not_ready"
    status = 409

    def __init__(self, template_id: str) -> None:
        super().__init__(template_id)
        self.template_id = template_id

    def __str__(self) -> str:
        return f"Template {self.template_id!r} is not ready yet."


class IdempotencyConflict(Refused):
    code = "conflict"
    status = 409

    def __str__(self) -> str:
        return "This Idempotency-Key was used with another request body."


class BadLimit(Refused):
    code = "bad_request"
    status = 400

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, reason)
        self.field = field
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}"


class NotRunning(Unavailable):
    """The sandbox sleeps, and may not be woken by access."""

    code = "unavailable"

    def __str__(self) -> str:
        return "The sandbox is not running, and its auto_resume is off. Resume it first."


class WakingUp(Unavailable):
    code = "unavailable"

    def __str__(self) -> str:
        return "The sandbox is waking up. Try again in a moment."


class ResumeFailed(Unavailable):
    code = "sandbox_resume_failed"

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"The sandbox could not be resumed: {self.reason}"


class Gone(Refused):
    """Deleted while somebody waited for it. Answered like an unknown id."""

    code = "not_found"
    status = 404

    def __str__(self) -> str:
        return "No such sandbox."
