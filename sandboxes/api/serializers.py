"""What clients send: each field checked and bounded, unknown ones refused by name."""

from typing import Any

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from common.api.serializers import StrictSerializer
from sandboxes.contexts import (
    ENV_NAME,
    MAX_STRING_BYTES,
    MAX_STRINGS,
    MAX_TOTAL_BYTES,
    parse_signal,
)
from sandboxes.models import Cut, Sandbox
from sandboxes.names import check_name
from sandboxes.quantities import NotAQuantity, format_memory, parse_sandbox_memory
from sandboxes.templates import is_template_id

# Ten years: beyond it a deadline is a mistake, and dates overflow.
MAX_SPAN_S = 315_360_000

MAX_ENV_VARS = 500
# Less than a guest's configuration or an agent's frame can carry, with all else in it.
MAX_ENV_BYTES = 256 * 1024
MAX_PATH_CHARS = 4096
MAX_TERMINAL_SIDE = 1000
MAX_INPUT_BYTES = 1024 * 1024

DEFAULT_LIMIT = 50
MAX_LIMIT = 200

STATUSES = sorted({"starting", "running", "paused", "terminating", "failed"})


@extend_schema_field(OpenApiTypes.STR)
class MemoryField(serializers.Field[int, str, str, Any]):
    """A quantity such as `512Mi`; read as bytes."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(help_text="From 128Mi to 16Gi.", **kwargs)

    def to_internal_value(self, data: Any) -> int:
        if not isinstance(data, str):
            raise serializers.ValidationError("Write memory as text, such as 512Mi or 2Gi.")
        try:
            return parse_sandbox_memory(data)
        except NotAQuantity as error:
            raise serializers.ValidationError(str(error)) from error

    def to_representation(self, value: int) -> str:
        return format_memory(value)


class ExactCharField(serializers.CharField):
    """Text kept to the byte: not trimmed, and only a string is one."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(trim_whitespace=False, **kwargs)

    def to_internal_value(self, data: Any) -> Any:
        if not isinstance(data, str):
            self.fail("invalid")
        if "\0" in data:
            raise serializers.ValidationError("A NUL character cannot be passed to a program.")
        if not _is_encodable(data):
            raise serializers.ValidationError("This is not valid Unicode.")
        return data


class NameField(serializers.CharField):
    """What people call a thing: one line of at most 255 characters."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(max_length=255, validators=[check_name], **kwargs)


class EnvVarsField(serializers.DictField):
    """Environment variables: names as a shell allows them, values to the byte."""

    child = ExactCharField(allow_blank=True)

    def to_internal_value(self, data: Any) -> Any:
        variables = super().to_internal_value(data)
        if len(variables) > MAX_ENV_VARS:
            raise serializers.ValidationError(f"At most {MAX_ENV_VARS} variables.")
        for name in variables:
            if ENV_NAME.fullmatch(name) is None:
                raise serializers.ValidationError(
                    {name: ["A name has letters, digits and _, and begins with no digit."]}
                )
        size_bytes = sum(len(f"{name}={value}".encode()) for name, value in variables.items())
        if size_bytes > MAX_ENV_BYTES:
            raise serializers.ValidationError(f"At most {MAX_ENV_BYTES} bytes together.")
        for name, value in variables.items():
            if len(f"{name}={value}".encode()) > MAX_STRING_BYTES:
                raise serializers.ValidationError(
                    {name: [f"Linux takes at most {MAX_STRING_BYTES} bytes, name included."]}
                )
        return variables


def _span(**kwargs: Any) -> serializers.IntegerField:
    return serializers.IntegerField(min_value=0, max_value=MAX_SPAN_S, **kwargs)


class Resources(StrictSerializer):
    """`resources`: memory is the only one to choose."""

    memory = MemoryField(required=False)


class NoServicesField(serializers.ListField):
    """An empty list, which the SDK sends of itself: services are not in this version."""

    def to_internal_value(self, data: Any) -> Any:
        if data != []:
            raise serializers.ValidationError("Services are not available in this version.")
        return []


class ClaimConfig(StrictSerializer):
    """`config` of a claim."""

    env_vars = EnvVarsField(required=False)
    resources = Resources(required=False)
    ttl = _span(default=0, help_text="Seconds until it is paused; 0 is never.")
    hard_ttl = _span(default=0, help_text="Seconds until it is deleted; 0 is never.")
    auto_resume = serializers.BooleanField(default=True)
    services = NoServicesField(required=False)

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        return _checked_spans(attrs)


class Claim(StrictSerializer):
    """A request for a new sandbox."""

    template = serializers.CharField(max_length=255)
    snapshot_id = serializers.CharField(max_length=255, required=False)
    config = ClaimConfig(required=False)


class UpdateConfig(StrictSerializer):
    """What of a sandbox can be changed: its lifetime, or its resources alone."""

    resources = Resources(required=False)
    ttl = _span(required=False)
    hard_ttl = _span(required=False)
    auto_resume = serializers.BooleanField(required=False)
    services = NoServicesField(required=False)

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        attrs.pop("services", None)
        if "resources" in attrs and len(attrs) > 1:
            raise serializers.ValidationError(
                {"resources": ["Change resources alone: it restarts the sandbox."]}
            )
        return _checked_spans(attrs)


class Update(StrictSerializer):
    """A change of a sandbox."""

    config = UpdateConfig(required=False)


class ExecutionState(StrictSerializer):
    """A pause or a resume."""

    memory = serializers.BooleanField(default=False)

    def validate_memory(self, value: bool) -> bool:
        if value:
            raise serializers.ValidationError(
                "Keeping memory over a pause is not available in this version."
            )
        return value


class Refresh(StrictSerializer):
    """A refresh of a sandbox's deadlines."""

    duration = serializers.IntegerField(min_value=0, max_value=MAX_SPAN_S, required=False)


class SandboxFilter(serializers.Serializer[Sandbox]):
    """The query of a list of sandboxes."""

    status = serializers.ChoiceField(STATUSES, required=False)
    template_id = serializers.CharField(max_length=255, required=False)
    paused = serializers.BooleanField(required=False, allow_null=True, default=None)
    limit = serializers.IntegerField(min_value=1, max_value=MAX_LIMIT, default=DEFAULT_LIMIT)
    offset = serializers.IntegerField(min_value=0, max_value=2**31 - 1, default=0)


def _consistency() -> serializers.ChoiceField:
    return serializers.ChoiceField(
        Cut.Consistency.values,
        default=Cut.Consistency.FILESYSTEM,
        help_text=(
            '"filesystem": a running guest brings its file system to rest for the cut. '
            '"crash": the disk as a power failure would leave it, without asking the guest.'
        ),
    )


class NewSnapshot(StrictSerializer):
    """A request to keep a sandbox's disk as it is now."""

    name = NameField(allow_blank=True, default="")
    description = serializers.CharField(max_length=2000, allow_blank=True, default="")
    expires_at = serializers.DateTimeField(required=False, allow_null=True)
    consistency = _consistency()


class Restore(StrictSerializer):
    """What a paused sandbox's disk is put back to: a snapshot, or a moment of its history."""

    snapshot_id = serializers.CharField(max_length=255, required=False)
    generation = serializers.IntegerField(min_value=0, max_value=2**31 - 1, required=False)

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        if len(attrs) != 1:
            raise serializers.ValidationError("Give either snapshot_id or generation.")
        return attrs


class ForkConfig(StrictSerializer):
    """What of a fork differs from its source."""

    ttl = _span(required=False, help_text="0 turns it off.")
    hard_ttl = _span(required=False, help_text="0 turns it off.")

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        return _checked_spans(attrs)


class Fork(ExecutionState):
    """A request for a sandbox that begins with this one's disk."""

    config = ForkConfig(required=False)
    generation = serializers.IntegerField(
        min_value=0,
        max_value=2**31 - 1,
        required=False,
        help_text="A moment of the source's history, instead of now.",
    )
    consistency = _consistency()


class ExportQuery(serializers.Serializer[Any]):
    """The query of an export."""

    generation = serializers.IntegerField(
        min_value=0,
        max_value=2**31 - 1,
        required=False,
        help_text="A moment of the history, instead of now.",
    )
    consistency = _consistency()


class Rebase(StrictSerializer):
    """A move onto another base image."""

    target_base_artifact_digest = serializers.CharField(max_length=255)
    rollback_ttl = serializers.IntegerField(min_value=0, max_value=604_800, required=False)


class SpecOverrides(StrictSerializer):
    """What a template says of itself."""

    description = serializers.CharField(max_length=2000, allow_blank=True, required=False)
    displayName = NameField(required=False)  # noqa: N815
    tags = serializers.ListField(
        child=serializers.CharField(max_length=100), max_length=50, required=False
    )


class NamesTemplate(serializers.Serializer[Any]):
    """Names a template that is to be made."""

    template_id = serializers.CharField(max_length=255)

    def validate_template_id(self, value: str) -> str:
        value = value.lower()
        if not is_template_id(value):
            raise serializers.ValidationError(
                "An id has letters, digits, '.', '_' and '-', and begins with one of the first "
                "two; a few words are taken."
            )
        return value


class TemplateFromSandbox(StrictSerializer, NamesTemplate):
    """A request for a template that begins with a sandbox's disk."""

    sandbox_id = serializers.CharField(max_length=255)
    spec_overrides = SpecOverrides(required=False)


class ImportQuery(NamesTemplate):
    """The query of an import, whose body is the image."""

    displayName = NameField(required=False)  # noqa: N815
    description = serializers.CharField(max_length=2000, required=False)


class Page(serializers.Serializer[Any]):
    """The query of a list that may be asked for in pieces."""

    limit = serializers.IntegerField(min_value=1, max_value=1000, required=False)
    cursor = serializers.CharField(max_length=100, required=False)


class HistoryPage(serializers.Serializer[Any]):
    """The query of a history."""

    limit = serializers.IntegerField(min_value=1, max_value=1000, default=100)
    cursor = serializers.IntegerField(
        min_value=0, max_value=2**31 - 1, required=False, help_text="From `next_cursor`."
    )


class Cmd(StrictSerializer):
    """`cmd` of a new context."""

    command = serializers.ListField(
        child=ExactCharField(allow_blank=True), min_length=1, max_length=MAX_STRINGS
    )

    def validate_command(self, value: list[str]) -> list[str]:
        if not value[0]:
            raise serializers.ValidationError("The program's name is empty.")
        sizes_bytes = [len(part.encode()) for part in value]
        if max(sizes_bytes) > MAX_STRING_BYTES:
            raise serializers.ValidationError(
                f"Linux takes at most {MAX_STRING_BYTES} bytes in one argument. "
                "Write a longer script to a file and run that."
            )
        if sum(sizes_bytes) > MAX_TOTAL_BYTES:
            raise serializers.ValidationError(
                f"At most {MAX_TOTAL_BYTES} bytes of arguments together."
            )
        return value


class PtySize(StrictSerializer):
    """Rows and columns of a terminal."""

    rows = serializers.IntegerField(min_value=1, max_value=MAX_TERMINAL_SIDE)
    cols = serializers.IntegerField(min_value=1, max_value=MAX_TERMINAL_SIDE)


class NewContext(StrictSerializer):
    """A request for a command to be run."""

    type = serializers.CharField(default="cmd", max_length=20)
    cmd = Cmd(required=False)
    wait_until_done = serializers.BooleanField(default=False)
    cwd = ExactCharField(required=False, max_length=MAX_PATH_CHARS)
    env_vars = EnvVarsField(required=False)
    pty_size = PtySize(required=False)
    idle_timeout_sec = _span(required=False, help_text="0 is no limit.")
    ttl_sec = _span(required=False, help_text="0 is no limit.")

    def validate_type(self, value: str) -> str:
        if value == "repl":
            raise serializers.ValidationError(
                'Contexts of type "repl" are not available in this version; use "cmd".'
            )
        if value != "cmd":
            raise serializers.ValidationError('The type is "cmd".')
        return value

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        if "cmd" not in attrs:
            raise serializers.ValidationError({"cmd": ["A command is needed."]})
        return attrs


class ContextInput(StrictSerializer):
    """Input for a context, as exact text."""

    # DRF takes declared fields out of the class, so they hide nothing.
    data = serializers.CharField(  # type: ignore[assignment]
        trim_whitespace=False, allow_blank=True
    )

    def validate_data(self, value: str) -> str:
        if not _is_encodable(value):
            raise serializers.ValidationError("This is not valid Unicode.")
        if len(value.encode()) > MAX_INPUT_BYTES:
            raise serializers.ValidationError(f"At most {MAX_INPUT_BYTES} bytes at once.")
        return value


class ContextSignal(StrictSerializer):
    """A signal, by name or number."""

    signal = serializers.CharField(max_length=20)

    def validate_signal(self, value: str) -> str:
        try:
            return parse_signal(value)
        except ValueError as error:
            raise serializers.ValidationError(str(error)) from error


class Move(StrictSerializer):
    """A move of a file or a directory."""

    # DRF takes declared fields out of the class, so they hide nothing.
    source = serializers.CharField(trim_whitespace=False)  # type: ignore[assignment]
    destination = serializers.CharField(trim_whitespace=False)


def _checked_spans(attrs: dict[str, Any]) -> dict[str, Any]:
    ttl_s, hard_ttl_s = attrs.get("ttl"), attrs.get("hard_ttl")
    if ttl_s and hard_ttl_s and ttl_s > hard_ttl_s:
        raise serializers.ValidationError({"ttl": ["Must not be longer than hard_ttl."]})
    return attrs


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
