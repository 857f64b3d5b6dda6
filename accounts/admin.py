"""Operators' view of users, teams and keys. What a change would corrupt is read-only."""

from typing import Any, ClassVar

from django.contrib import admin
from django.contrib.auth.admin import UserAdmin as DjangoUserAdmin
from django.db import models
from django.http import HttpRequest

from accounts.models import ApiKey, AuditEvent, Membership, Team, User


class MembershipInline(admin.TabularInline[Membership, Any]):
    model = Membership
    extra = 0
    autocomplete_fields = ("team", "user")
    readonly_fields = ("joined_at",)


@admin.register(User)
class UserAdmin(DjangoUserAdmin[User]):
    list_display = ("email", "name", "is_active", "is_staff", "last_login", "date_joined")
    list_filter = ("is_active", "is_staff", "date_joined")
    search_fields = ("email", "name", "id")
    ordering = ("email",)
    readonly_fields = ("id", "last_login", "date_joined", "updated_at")
    inlines = (MembershipInline,)
    formfield_overrides: ClassVar = {models.URLField: {"assume_scheme": "https"}}
    fieldsets = (
        (None, {"fields": ("id", "email", "password", "name", "avatar_url")}),
        ("May", {"fields": ("is_active", "is_staff", "is_superuser", "groups")}),
        ("When", {"fields": ("last_login", "date_joined", "updated_at")}),
    )
    add_fieldsets = ((None, {"fields": ("email", "name", "password1", "password2")}),)


@admin.register(Team)
class TeamAdmin(admin.ModelAdmin[Team]):
    list_display = (
        "name",
        "slug",
        "owner",
        "running_limit",
        "paused_limit",
        "disk_limit_bytes",
        "created_at",
    )
    list_filter = ("home_region_id", "created_at")
    list_select_related = ("owner",)
    search_fields = ("name", "slug", "id", "owner__email")
    autocomplete_fields = ("owner",)
    readonly_fields = ("id", "home_region_id", "created_at", "updated_at")
    inlines = (MembershipInline,)

    def has_delete_permission(self, request: HttpRequest, obj: Team | None = None) -> bool:
        # Its sandboxes and its bills would be left without an owner.
        return False


@admin.register(ApiKey)
class ApiKeyAdmin(admin.ModelAdmin[ApiKey]):
    list_display = (
        "name",
        "hint",
        "team",
        "created_by",
        "roles",
        "is_active",
        "expires_at",
        "last_used_at",
        "usage_count",
    )
    list_filter = ("is_active", "created_at", "expires_at")
    list_select_related = ("team", "created_by")
    search_fields = ("name", "hint", "id", "team__name", "created_by__email")
    # Closing a key is all that an operator may do; its digest is of no use to anyone.
    fields = ("id", *list_display, "created_at", "updated_at")
    readonly_fields = tuple(name for name in fields if name != "is_active")

    def has_add_permission(self, request: HttpRequest) -> bool:
        # Its secret would be shown to no one.
        return False


@admin.register(AuditEvent)
class AuditEventAdmin(admin.ModelAdmin[AuditEvent]):
    list_display = ("at", "team", "action", "resource_id", "user", "api_key", "source_ip")
    list_filter = ("action", "resource_type", "at")
    list_select_related = ("team", "user", "api_key")
    search_fields = ("resource_id", "team__name", "user__email", "source_ip")
    date_hierarchy = "at"
    show_full_result_count = False

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(
        self, request: HttpRequest, obj: AuditEvent | None = None
    ) -> bool:
        return False

    def has_delete_permission(
        self, request: HttpRequest, obj: AuditEvent | None = None
    ) -> bool:
        return False
