"""Operators' view of the fleet.

Only whether a host takes new guests can be changed here. Everything else is kept by the host
itself, and by services under their locks.
"""

from typing import Any

from django.contrib import admin
from django.db.models import Count, QuerySet
from django.http import HttpRequest
from django.utils import timezone
from django.utils.html import format_html
from django.utils.safestring import SafeString

from common.units import GiB, MiB
from hosts.models import SILENT_AFTER, Generation, Host, Placement, Volume


class RecordAdmin(admin.ModelAdmin[Any]):
    """Rows that are to be looked at: a change by hand would contradict what is there."""

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class HeartbeatFilter(admin.SimpleListFilter):
    title = "heartbeat"
    parameter_name = "heartbeat"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("alive", "alive"), ("silent", "silent")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Host]) -> QuerySet[Host]:
        horizon = timezone.now() - SILENT_AFTER
        match self.value():
            case "alive":
                return queryset.filter(seen_at__gt=horizon)
            case "silent":
                return queryset.exclude(seen_at__gt=horizon)
            case _:
                return queryset


_HOST_FACTS = (
    "name",
    "heartbeat",
    "promised",
    "used",
    "cpu_count",
    "accelerator",
    "versions",
    "gate_host",
    "gate_port",
    "gate_public_key",
    "subnet",
    "created_at",
)


@admin.register(Host)
class HostAdmin(admin.ModelAdmin[Host]):
    list_display = (
        "name",
        "heartbeat",
        "is_open",
        "promised",
        "used",
        "guests",
        "cpu_count",
        "accelerator",
        "versions",
    )
    list_filter = ("is_open", HeartbeatFilter, "accelerator")
    search_fields = ("name", "gate_host", "subnet")
    ordering = ("name",)
    actions = ("close_for_guests", "open_for_guests")
    fields = ("is_open", *_HOST_FACTS)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Host]:
        return super().get_queryset(request).annotate(guest_count=Count("placements"))

    def get_readonly_fields(self, request: HttpRequest, obj: Host | None = None) -> list[str]:
        return [*_HOST_FACTS]

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False  # a host registers itself, with the keys that only it has

    def has_delete_permission(self, request: HttpRequest, obj: Host | None = None) -> bool:
        return False  # disks and guests may still be on it

    @admin.display(description="heartbeat", ordering="seen_at")
    def heartbeat(self, host: Host) -> SafeString | str:
        """Say how long ago the host was heard of."""
        if host.seen_at is None:
            return "never"
        since_s = (timezone.now() - host.seen_at).total_seconds()
        mark, said = ("●", "alive") if host.is_alive else ("○", "silent")
        return format_html('<span title="{}">{} {}, {} s ago</span>', host.seen_at, mark, said,
                           round(max(since_s, 0)))  # fmt: skip

    @admin.display(description="promised", ordering="promised_bytes")
    def promised(self, host: Host) -> SafeString:
        """Draw how much of its memory is promised to guests."""
        return _bar(host.promised_bytes, host.memory_bytes)

    @admin.display(description="used", ordering="used_bytes")
    def used(self, host: Host) -> SafeString:
        """Draw how much of its memory its guests use."""
        return _bar(host.used_bytes, host.memory_bytes)

    @admin.display(description="guests", ordering="guest_count")
    def guests(self, host: Any) -> int:
        """Count the guests that have a place on it."""
        return int(host.guest_count)

    @admin.action(description="Take no new guests")
    def close_for_guests(self, request: HttpRequest, queryset: QuerySet[Host]) -> None:
        """Let the guests of the chosen hosts stay, and give them no others."""
        self.message_user(request, f"{queryset.update(is_open=False)} closed.")

    @admin.action(description="Take new guests")
    def open_for_guests(self, request: HttpRequest, queryset: QuerySet[Host]) -> None:
        """Give the chosen hosts guests again."""
        self.message_user(request, f"{queryset.update(is_open=True)} opened.")


@admin.register(Placement)
class PlacementAdmin(RecordAdmin):
    list_display = ("guest_uuid", "host", "address", "memory", "created_at")
    list_filter = ("host",)
    list_select_related = ("host",)
    search_fields = ("guest_uuid", "address")
    ordering = ("-created_at",)

    @admin.display(description="memory", ordering="memory_bytes")
    def memory(self, placement: Placement) -> str:
        """Write how much it was promised."""
        return f"{placement.memory_bytes // MiB:,} MiB"


@admin.register(Volume)
class VolumeAdmin(RecordAdmin):
    list_display = (
        "id",
        "head",
        "epoch",
        "attached_host",
        "attached_for",
        "files_ready_at",
        "created_at",
        "deleted_at",
    )
    list_filter = ("attached_for", "attached_host", ("deleted_at", admin.EmptyFieldListFilter))
    list_select_related = ("head", "attached_host")
    search_fields = ("id", "sandbox__id")
    ordering = ("-created_at",)
    date_hierarchy = "created_at"


@admin.register(Generation)
class GenerationAdmin(RecordAdmin):
    list_display = ("volume", "number", "kind", "epoch", "uploaded", "stored", "created_at")
    list_filter = ("kind",)
    list_select_related = ("volume",)
    search_fields = ("volume__id", "root_key")
    ordering = ("-created_at",)
    date_hierarchy = "created_at"

    @admin.display(description="uploaded", ordering="uploaded_bytes")
    def uploaded(self, generation: Generation) -> str:
        """Write how much its commit sent."""
        return f"{generation.uploaded_bytes / MiB:,.1f} MiB"

    @admin.display(description="stored", ordering="stored_bytes")
    def stored(self, generation: Generation) -> str:
        """Write how much is kept for its volume alone."""
        return f"{generation.stored_bytes / MiB:,.1f} MiB"


def _bar(part_bytes: int, whole_bytes: int) -> SafeString:
    return format_html(
        '<progress max="{}" value="{}"></progress> {} of {} GiB',
        whole_bytes,
        part_bytes,
        f"{part_bytes / GiB:.1f}",
        f"{whole_bytes / GiB:.1f}",
    )
