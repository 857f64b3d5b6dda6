"""The shapes of answers, for the published schema; `bodies` makes them."""

from typing import Any

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, inline_serializer
from rest_framework import serializers

from common.api import schema as shared
from hosts.models import Generation

enveloped = shared.enveloped

STATUSES = ("starting", "running", "paused", "terminating", "failed")

IDEMPOTENCY_KEY = OpenApiParameter(
    "Idempotency-Key",
    OpenApiTypes.STR,
    OpenApiParameter.HEADER,
    description=(
        "1 to 255 bytes. The same key with the same body returns the sandbox of the first "
        "call; with another body it is refused with 409."
    ),
)
PATH = OpenApiParameter(
    "path",
    OpenApiTypes.STR,
    required=True,
    description=(
        "Absolute, or relative to the root; at most 4096 bytes, no NUL. A byte that is not "
        "UTF-8 is percent-encoded as it is (%FF), or written as listed (U+F780 to U+F7FF)."
    ),
)


GENERATION = OpenApiParameter(
    "generation",
    OpenApiTypes.INT,
    description="A moment of the sandbox's history, instead of now. For reading only.",
)


class ErrorBody(serializers.Serializer[Any]):
    """Why a request was refused."""

    code = serializers.CharField()
    message = serializers.CharField()
    details = serializers.JSONField(required=False)


class Failure(serializers.Serializer[Any]):
    """The envelope of every refusal."""

    success = serializers.BooleanField(default=False)
    error = ErrorBody()


_WHY = {
    400: "A field is wrong; the message names it.",
    403: "The key's roles do not allow it.",
    404: "There is no such thing, or it is another team's.",
    409: "Its state does not allow it.",
    410: "The process has ended.",
    413: "The body is too large.",
    429: "A quota is used up.",
    503: "Not right now; try again after `Retry-After`.",
}


def refusals(*statuses: int) -> dict[int, OpenApiResponse]:
    """Return the documented refusals, 401 always among them."""
    reasons = {status: OpenApiResponse(Failure, _WHY[status]) for status in statuses}
    return {401: OpenApiResponse(Failure, "The key is missing or not usable."), **reasons}


class Deadlines(serializers.Serializer[Any]):
    expires_at = serializers.DateTimeField(required=False, help_text="Absent when off.")
    hard_expires_at = serializers.DateTimeField(required=False, help_text="Absent when off.")


class Runtime(serializers.Serializer[Any]):
    runtime_id = serializers.CharField(help_text="Empty while paused.")
    pod_name = serializers.CharField(help_text="The same, for older clients.")


class ClaimAnswer(Runtime):
    sandbox_id = serializers.CharField()
    status = serializers.ChoiceField(STATUSES)
    template = serializers.CharField()
    memory = serializers.CharField()


class Summary(Deadlines):
    id = serializers.CharField()
    template_id = serializers.CharField()
    status = serializers.ChoiceField(STATUSES)
    paused = serializers.BooleanField()
    runtime_generation = serializers.IntegerField()
    memory = serializers.CharField()
    cost_usd = serializers.CharField(help_text="What its running time has cost so far.")
    created_at = serializers.DateTimeField()
    updated_at = serializers.DateTimeField()


class ResourcesAnswer(serializers.Serializer[Any]):
    memory = serializers.CharField()


class StorageAnswer(serializers.Serializer[Any]):
    generation = serializers.IntegerField(help_text="Number of the last commit; 0 before it.")
    stored_bytes = serializers.IntegerField(help_text="Kept beyond the template's own data.")
    uploaded_bytes = serializers.IntegerField(help_text="By the last commit.")
    fetched_bytes = serializers.IntegerField(help_text="By the last start, until ready.")


class DiskAnswer(serializers.Serializer[Any]):
    used_bytes = serializers.IntegerField()
    size_bytes = serializers.IntegerField(help_text="Of the file system; it grows by itself.")
    ceiling_bytes = serializers.IntegerField(help_text="How large it may become.")
    stored_bytes = serializers.IntegerField(help_text="What is kept of it, compressed.")
    measured_at = serializers.DateTimeField()


class SandboxAnswer(Summary, Runtime):
    team_id = serializers.CharField()
    user_id = serializers.CharField(required=False)
    auto_resume = serializers.BooleanField()
    claimed_at = serializers.DateTimeField()
    services = serializers.ListField(child=serializers.JSONField())
    resources = ResourcesAnswer()
    storage = StorageAnswer()
    disk = DiskAnswer(required=False, help_text="As last measured.")
    health = serializers.CharField(required=False)
    last_error = serializers.CharField(required=False)
    parent_id = serializers.CharField(required=False, help_text="What it was forked from.")
    snapshot_id = serializers.CharField(
        required=False, help_text="What it was claimed from, or restored to last."
    )


class SandboxList(serializers.Serializer[Any]):
    sandboxes = Summary(many=True)
    count = serializers.IntegerField()
    has_more = serializers.BooleanField()


class StatusAnswer(Deadlines, Runtime):
    sandbox_id = serializers.CharField()
    template_id = serializers.CharField()
    team_id = serializers.CharField()
    user_id = serializers.CharField(required=False)
    status = serializers.ChoiceField(STATUSES)
    claimed_at = serializers.DateTimeField()
    created_at = serializers.DateTimeField()
    health = serializers.CharField(required=False)


class SnapshotAnswer(serializers.Serializer[Any]):
    id = serializers.CharField()
    sandbox_id = serializers.CharField(help_text="Its source, which may be deleted since.")
    created_at = serializers.DateTimeField()
    name = serializers.CharField(required=False)
    description = serializers.CharField(required=False)
    expires_at = serializers.DateTimeField(required=False)
    generation = serializers.IntegerField()
    size_bytes = serializers.IntegerField(help_text="Of the device.")


class SnapshotList(serializers.Serializer[Any]):
    snapshots = SnapshotAnswer(many=True)
    count = serializers.IntegerField()
    next_cursor = serializers.CharField(required=False, help_text="Where there are more.")


class RestoreAnswer(serializers.Serializer[Any]):
    sandbox_id = serializers.CharField()
    snapshot_id = serializers.CharField(required=False)
    generation = serializers.IntegerField(help_text="The new one; it is the current one.")
    status = serializers.ChoiceField(STATUSES)


class ForkAnswer(serializers.Serializer[Any]):
    source_sandbox_id = serializers.CharField()
    sandbox = SandboxAnswer()


class MomentAnswer(serializers.Serializer[Any]):
    generation = serializers.IntegerField()
    kind = serializers.ChoiceField(Generation.Kind.values)
    created_at = serializers.DateTimeField()
    size_bytes = serializers.IntegerField(help_text="Of the device.")
    changed_bytes = serializers.IntegerField(help_text="Since the one before it.")
    uploaded_bytes = serializers.IntegerField()
    stored_bytes = serializers.IntegerField(help_text="Kept beyond the template's own data.")
    restorable = serializers.BooleanField()
    is_current = serializers.BooleanField()
    snapshots = serializers.ListField(child=serializers.CharField(), help_text="Their ids.")


class HistoryAnswer(serializers.Serializer[Any]):
    sandbox_id = serializers.CharField()
    generations = MomentAnswer(many=True)
    next_cursor = serializers.IntegerField(required=False, help_text="Where there are more.")


class RefreshAnswer(Deadlines):
    sandbox_id = serializers.CharField()


class PauseAnswer(serializers.Serializer[Any]):
    sandbox_id = serializers.CharField()
    paused = serializers.BooleanField()
    status = serializers.ChoiceField(STATUSES)


class ResumeAnswer(serializers.Serializer[Any]):
    sandbox_id = serializers.CharField()
    resumed = serializers.BooleanField(help_text="false: accepted, poll until it runs.")
    status = serializers.ChoiceField(STATUSES)


class MessageAnswer(serializers.Serializer[Any]):
    message = serializers.CharField()


class ContextAnswer(serializers.Serializer[Any]):
    id = serializers.CharField()
    type = serializers.ChoiceField(("cmd",))
    running = serializers.BooleanField()
    paused = serializers.BooleanField()
    state = serializers.CharField()
    command = serializers.ListField(child=serializers.CharField())
    created_at = serializers.DateTimeField()
    finished_at = serializers.DateTimeField(required=False)
    cwd = serializers.CharField(required=False)
    env_vars = serializers.DictField(child=serializers.CharField(), required=False)
    output_raw = serializers.CharField(required=False)
    stdout = serializers.CharField(required=False)
    stderr = serializers.CharField(required=False)
    stdout_base64 = serializers.CharField(
        required=False, help_text="The exact bytes, where they are not all UTF-8."
    )
    stderr_base64 = serializers.CharField(required=False)
    exit_code = serializers.IntegerField(required=False)
    signal = serializers.IntegerField(required=False)
    pid = serializers.IntegerField(required=False)
    timed_out = serializers.BooleanField(required=False)
    reason = serializers.CharField(required=False, help_text="Why it was ended.")
    truncated = serializers.BooleanField(required=False, help_text="Output is missing.")
    dropped_bytes = serializers.IntegerField(required=False)


class ContextList(serializers.Serializer[Any]):
    contexts = ContextAnswer(many=True)


class FileInfo(serializers.Serializer[Any]):
    name = serializers.CharField()
    path = serializers.CharField()
    type = serializers.ChoiceField(("file", "dir", "symlink"))
    size = serializers.IntegerField()
    mode = serializers.CharField(help_text="Four octal digits.")
    mod_time = serializers.DateTimeField()
    is_link = serializers.BooleanField()
    link_target = serializers.CharField(required=False)


class FileList(serializers.Serializer[Any]):
    entries = FileInfo(many=True)
    truncated = serializers.BooleanField(required=False, help_text="There are more.")
    next_cursor = serializers.CharField(required=False, help_text="Of the next page.")


class TemplateAnswer(serializers.Serializer[Any]):
    template_id = serializers.CharField()
    scope = serializers.ChoiceField(("public", "team"))
    spec = serializers.JSONField()
    team_id = serializers.CharField(required=False)
    status = serializers.JSONField(required=False)
    created_at = serializers.DateTimeField()
    updated_at = serializers.DateTimeField()


class TemplateList(serializers.Serializer[Any]):
    templates = TemplateAnswer(many=True)
    count = serializers.IntegerField()


class Quota(serializers.Serializer[Any]):
    team_id = serializers.CharField()
    dimension = serializers.CharField()
    kind = serializers.ChoiceField(("capacity", "rate"))
    limit_value = serializers.IntegerField(allow_null=True)
    interval_ms = serializers.IntegerField(allow_null=True)
    burst_value = serializers.IntegerField(allow_null=True)
    current = serializers.IntegerField(allow_null=True)
    remaining = serializers.IntegerField(allow_null=True)
    unlimited = serializers.BooleanField()
    unit = serializers.CharField()
    source = serializers.ChoiceField(  # type: ignore[assignment]  # taken out by DRF
        ("region_default", "team_override", "unlimited")
    )


def done(word: str) -> OpenApiResponse:
    """Return the documented answer {word: true}."""
    shape = inline_serializer(word.capitalize(), {word: serializers.BooleanField()})
    return enveloped(word.capitalize(), shape)
