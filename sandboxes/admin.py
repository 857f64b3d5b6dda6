"""Operators' view of sandboxes and templates.

A sandbox's row is one side of a machine that runs or sleeps, and changes by its services
alone; here it is read.
"""

from typing import Any

from django.contrib import admin
from django.http import HttpRequest

from common.units import MiB
from sandboxes.models import ClaimRecord, Cut, FileView, Run, Sandbox, Snapshot, Template


class RecordAdmin(admin.ModelAdmin[Any]):
    """Rows that are to be looked at: a change by hand would contradict what is there."""

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    @admin.display(description="memory", ordering="memory_bytes")
    def memory(self, row: Any) -> str:
        """Write the row's memory."""
        return f"{row.memory_bytes // MiB:,} MiB"


class RunInline(admin.TabularInline[Run, Sandbox]):
    model = Run
    extra = 0
    can_delete = False
    fields = (
        "runtime_generation",
        "host",
        "requested_at",
        "ready_at",
        "ended_at",
        "end_reason",
        "fetched_bytes",
    )
    readonly_fields = fields

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(Sandbox)
class SandboxAdmin(RecordAdmin):
    list_display = (
        "id",
        "team",
        "state",
        "template_name",
        "memory",
        "host",
        "runtime_generation",
        "last_error",
        "created_at",
    )
    list_filter = ("state", "host", "pause_reason", "template_name", "created_at")
    list_select_related = ("team", "host")
    search_fields = ("id", "uuid", "team__name", "created_by__email", "address")
    ordering = ("-created_at",)
    date_hierarchy = "created_at"
    # What a team put into its environment is often a secret.
    exclude = ("env_vars",)
    inlines = (RunInline,)
    show_full_result_count = False


@admin.register(Template)
class TemplateAdmin(admin.ModelAdmin[Template]):
    list_display = (
        "template_id",
        "team",
        "memory_bytes",
        "is_ready",
        "created_at",
        "updated_at",
    )
    list_filter = (("generation", admin.EmptyFieldListFilter), "created_at")
    list_select_related = ("team",)
    search_fields = ("template_id", "team__name")
    ordering = ("template_id",)

    def get_readonly_fields(
        self, request: HttpRequest, obj: Template | None = None
    ) -> list[str]:
        # Its disk is what its sandboxes grew from; what it says of itself may be changed.
        return [
            "team",
            "template_id",
            "memory_bytes",
            "generation",
            "source",
            "created_at",
            "updated_at",
        ]

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False  # a template without a disk would refuse every claim

    def has_delete_permission(self, request: HttpRequest, obj: Template | None = None) -> bool:
        return False

    @admin.display(description="ready", boolean=True)
    def is_ready(self, template: Template) -> bool:
        """Say whether it can be claimed from."""
        return template.is_ready


@admin.register(Run)
class RunAdmin(RecordAdmin):
    list_display = (
        "sandbox",
        "runtime_generation",
        "host",
        "memory",
        "ready_at",
        "ended_at",
        "end_reason",
        "fetched_bytes",
    )
    list_filter = ("end_reason", "host", "ready_at")
    list_select_related = ("sandbox", "host")
    search_fields = ("sandbox__id",)
    ordering = ("-ready_at",)
    date_hierarchy = "ready_at"
    show_full_result_count = False


@admin.register(ClaimRecord)
class ClaimRecordAdmin(RecordAdmin):
    list_display = ("key", "team", "sandbox", "created_at")
    list_filter = ("created_at",)
    list_select_related = ("team", "sandbox")
    search_fields = ("key", "sandbox__id", "team__name")
    ordering = ("-created_at",)


@admin.register(Snapshot)
class SnapshotAdmin(RecordAdmin):
    list_display = ("id", "name", "team", "sandbox", "created_at", "expires_at", "deleted_at")
    list_filter = (("deleted_at", admin.EmptyFieldListFilter), "created_at", "expires_at")
    list_select_related = ("team", "sandbox")
    search_fields = ("id", "name", "sandbox__id", "team__name")
    ordering = ("-created_at",)
    date_hierarchy = "created_at"
    show_full_result_count = False


@admin.register(Cut)
class CutAdmin(RecordAdmin):
    list_display = ("sandbox", "consistency", "state", "error", "requested_at", "ended_at")
    list_filter = ("state", "consistency", "requested_at")
    list_select_related = ("sandbox",)
    search_fields = ("sandbox__id", "error")
    ordering = ("-requested_at",)
    show_full_result_count = False


@admin.register(FileView)
class FileViewAdmin(RecordAdmin):
    list_display = ("sandbox", "generation", "volume", "error", "created_at")
    list_filter = ("created_at",)
    list_select_related = ("sandbox", "generation", "volume")
    search_fields = ("sandbox__id",)
    ordering = ("-created_at",)
