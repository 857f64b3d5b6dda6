"""Operators' view of the meters. Bills are made of these rows: none can be changed here."""

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest

from billing.models import MeterInterval


class OpenFilter(admin.SimpleListFilter):
    title = "period"
    parameter_name = "period"

    def lookups(
        self, request: HttpRequest, model_admin: admin.ModelAdmin[MeterInterval]
    ) -> list[tuple[str, str]]:
        return [("open", "open"), ("closed", "closed")]

    def queryset(
        self, request: HttpRequest, queryset: QuerySet[MeterInterval]
    ) -> QuerySet[MeterInterval]:
        match self.value():
            case "open":
                return queryset.filter(period__upper_inf=True)
            case "closed":
                return queryset.filter(period__upper_inf=False)
            case _:
                return queryset


@admin.register(MeterInterval)
class MeterIntervalAdmin(admin.ModelAdmin[MeterInterval]):
    list_display = ("subject_id", "team", "meter", "quantity", "began", "ended")
    list_filter = ("meter", OpenFilter)
    list_select_related = ("team",)
    search_fields = ("subject_id", "team__name", "team__id")
    ordering = ("-pk",)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(
        self, request: HttpRequest, obj: MeterInterval | None = None
    ) -> bool:
        return False

    def has_delete_permission(
        self, request: HttpRequest, obj: MeterInterval | None = None
    ) -> bool:
        return False

    @admin.display(description="from")
    def began(self, interval: MeterInterval) -> object:
        """Return when the quantity began to be held."""
        return interval.period.lower

    @admin.display(description="until")
    def ended(self, interval: MeterInterval) -> object:
        """Return when it ended; an open one is held still."""
        return interval.period.upper
