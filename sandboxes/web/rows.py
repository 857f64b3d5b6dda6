"""What the pages read of sandboxes, in a fixed number of queries however many there are."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from django.db.models import Count, Q
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from accounts.models import Team
from billing.costs import cost_of
from billing.pricing import memory_price_per_hour
from sandboxes.models import ACTIVE, Sandbox, SandboxQuerySet

PAGE_SIZE = 50
SEARCH_CHARS = 80

State = Sandbox.State


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A sandbox as the list shows it."""

    sandbox: Sandbox
    cost: Decimal
    """Of this month so far, in dollars."""
    stored_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """A page of the list; `next` is the cursor of the one that follows, if there is one."""

    rows: list[Row]
    next: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Filters:
    """What the reader wants to see; empty is everything."""

    search: str = ""
    state: str = ""
    template: str = ""

    @property
    def are_set(self) -> bool:
        return bool(self.search or self.state or self.template)

    def apply(self, sandboxes: SandboxQuerySet) -> SandboxQuerySet:
        """Narrow the sandboxes down."""
        if self.search:
            sandboxes = sandboxes.filter(
                Q(id__icontains=self.search) | Q(template_name__icontains=self.search)
            )
        if self.state:
            sandboxes = sandboxes.filter(state=self.state)
        if self.template:
            sandboxes = sandboxes.filter(template_name=self.template)
        return sandboxes


@dataclass(frozen=True, kw_only=True, slots=True)
class Quota:
    """How many sandboxes a team may have, and has."""

    running: int
    running_limit: int
    paused: int
    paused_limit: int

    @property
    def running_percent(self) -> int:
        return min(100, 100 * self.running // max(self.running_limit, 1))

    @property
    def is_used_up(self) -> bool:
        return self.running >= self.running_limit


def month_start() -> datetime:
    """Return the first instant of this month (UTC)."""
    return timezone.now().replace(day=1, hour=0, minute=0, second=0, microsecond=0)


def page_of(team: Team, filters: Filters, *, after: str = "") -> Page:
    """Return a page of the team's sandboxes, newest first.

    It is found by key, not by counting, so the last of 2,000 pages is as quick as the first.
    """
    sandboxes = filters.apply(Sandbox.objects.of(team).present())
    sandboxes = sandboxes.select_related("volume__head").order_by("-created_at", "-pk")
    cursor = _read_cursor(after)
    if cursor is not None:
        created_at, pk = cursor
        # The first condition is what the index answers; the second settles equal instants.
        sandboxes = sandboxes.filter(created_at__lte=created_at).exclude(
            created_at=created_at, pk__gte=pk
        )
    found = list(sandboxes[: PAGE_SIZE + 1])
    has_more = len(found) > PAGE_SIZE
    shown = found[:PAGE_SIZE]
    return Page(rows=rows_of(shown), next=_write_cursor(shown[-1]) if has_more else "")


def rows_of(sandboxes: Sequence[Sandbox]) -> list[Row]:
    """Return the rows of sandboxes whose `volume__head` was selected along."""
    costs = cost_of([sandbox.id for sandbox in sandboxes], since=month_start())
    return [
        Row(sandbox=sandbox, cost=costs[sandbox.id], stored_bytes=stored_bytes(sandbox))
        for sandbox in sandboxes
    ]


def stored_bytes(sandbox: Sandbox) -> int:
    """Return what is kept for this sandbox alone; nothing before its first commit."""
    head = sandbox.volume.head
    # Until then its head is its template's.
    if head is None or head.volume_id != sandbox.volume_id:
        return 0
    return head.stored_bytes


def quota_of(team: Team) -> Quota:
    """Return what the team has of what it may have."""
    sandboxes = Sandbox.objects.of(team)
    by_state = sandboxes.present().order_by().values_list("state").annotate(Count("pk"))
    counted = dict.fromkeys(State.values, 0) | dict(by_state)
    return Quota(
        running=sum(counted[state] for state in ACTIVE),
        running_limit=team.running_limit,
        paused=counted[State.PAUSED],
        paused_limit=team.paused_limit,
    )


def price_of(sandbox: Sandbox) -> Decimal:
    """Return what an hour of this sandbox's running costs, in dollars."""
    return memory_price_per_hour(sandbox.memory_mib)


def run_cost(sandbox: Sandbox) -> Decimal:
    """Return what the run that is under way has cost so far, in dollars."""
    if sandbox.state != State.RUNNING or sandbox.started_at is None:
        return Decimal(0)
    return cost_of([sandbox.id], since=sandbox.started_at)[sandbox.id]


def _write_cursor(sandbox: Sandbox) -> str:
    return f"{sandbox.created_at.isoformat()}~{sandbox.pk}"


def _read_cursor(text: str) -> tuple[datetime, str] | None:
    """Return where a page starts; None for what is no cursor, which is the first page."""
    at, _, pk = text.partition("~")
    try:
        created_at = parse_datetime(at)
    except ValueError:
        return None
    if created_at is None or created_at.tzinfo is None or not pk:
        return None
    return created_at, pk
