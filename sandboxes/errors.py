"""Why a request about a sandbox is refused."""

from typing import ClassVar

from common.errors import Refused, Unavailable

_SHOWN_CHARS = 200


class WrongState(Refused):
    code = "conflict"

    def __init__(self, state: str, wanted: str = "", *, what: str = "") -> None:
        """Refuse a state, or what else cannot be done: "cannot <what>."."""
        super().__init__(state, wanted)
        self.state = state
        self.what = what or f"become {wanted}"

    def __str__(self) -> str:
        return f"A sandbox that is {self.state} cannot {self.what}."


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
    retry_after_s = 1

    def __init__(self, template_id: str) -> None:
        super().__init__(template_id)
        self.template_id = template_id

    def __str__(self) -> str:
        return f"Template {self.template_id!r} is not ready yet."


class TemplateExists(Refused):
    code = "conflict"
    status = 409

    def __init__(self, template_id: str) -> None:
        super().__init__(template_id)
        self.template_id = template_id

    def __str__(self) -> str:
        return f"There is a template {self.template_id!r} already."


class TemplateIsPublic(Refused):
    code = "forbidden"
    status = 403

    def __str__(self) -> str:
        return "A public template belongs to the platform and cannot be changed."


class SnapshotNotFound(Refused):
    code = "not_found"
    status = 404

    def __str__(self) -> str:
        return "No such snapshot."


class MomentNotFound(Refused):
    """The history has no such generation (any more)."""

    code = "not_found"
    status = 404

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def __str__(self) -> str:
        return f"The history of this sandbox has no generation {self.number} (any more)."


class NotInThisVersion(Refused):
    """A feature of the contract that this version does not have."""

    code = "conflict"
    status = 409

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what

    def __str__(self) -> str:
        return f"{self.what} is not available in this version."


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
    retry_after_s = 1

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


class PathRefused(Refused):
    """A file operation that the paths do not allow; `path` is what the client sent."""

    reason: ClassVar[str]

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        shown = self.path if len(self.path) <= _SHOWN_CHARS else self.path[:_SHOWN_CHARS] + "…"
        return f"{shown}: {self.reason}"


class BadPath(Refused):
    code = "bad_request"
    status = 400

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(field, reason)
        self.field = field
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.field}: {self.reason}"


class FileMissing(PathRefused):
    code = "file_not_found"
    status = 404
    reason = "no such file or directory."


class DirectoryMissing(PathRefused):
    code = "directory_not_found"
    status = 404
    reason = "no such directory."


class FilePermissionDenied(PathRefused):
    code = "permission_denied"
    status = 403
    reason = "permission denied."


class PathExists(PathRefused):
    code = "path_exists"
    status = 409
    reason = "it exists already."


class PathNotDirectory(PathRefused):
    code = "path_not_directory"
    status = 409
    reason = "it is, or leads through, something that is no directory."


class PathNotFile(PathRefused):
    code = "path_not_file"
    status = 409
    reason = "it is no regular file."


class FileTooLarge(Refused):
    code = "file_too_large"
    status = 413

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self.limit_bytes = limit_bytes

    def __str__(self) -> str:
        return f"A file may be written with at most {self.limit_bytes} bytes in one request."


class BodyIncomplete(Refused):
    """The upload ended before its announced length; nothing was changed."""

    code = "bad_request"
    status = 400

    def __str__(self) -> str:
        return "The body ended before its Content-Length. The file is as it was."


class DiskFull(PathRefused):
    code = "no_space"
    status = 507
    reason = "no space is left on the sandbox's disk."


class FileOperationFailed(PathRefused):
    """The file system refused for a reason that SFTP does not name."""

    code = "operation_failed"
    status = 500
    reason = "the sandbox's file system refused the operation."


class FilesLost(Unavailable):
    """The session on the files ended under the operation; its outcome is unknown."""

    code = "unavailable"

    def __str__(self) -> str:
        return "The connection to the sandbox's files broke. Try again in a moment."


class ContextRefused(Refused):
    """What a guest's agent answered to a request about a context."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class InvalidContextRequest(ContextRefused):
    code = "invalid_request"
    status = 400


class ContextNotFound(ContextRefused):
    code = "context_not_found"
    status = 404


class ProcessFinished(ContextRefused):
    code = "process_finished"
    status = 410


class ProcessNotRunning(ContextRefused):
    code = "process_not_running"
    status = 409


class InputBufferFull(ContextRefused):
    code = "input_buffer_full"
    status = 409


class PtyUnavailable(ContextRefused):
    code = "pty_unavailable"
    status = 400


class ContextNotCreated(ContextRefused):
    code = "create_failed"
    status = 500
