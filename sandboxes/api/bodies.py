"""What clients are answered about sandboxes, templates and quotas.

Optional fields that have no value are left out: clients fail on null.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from accounts.models import DEFAULT_PAUSED_LIMIT, DEFAULT_RUNNING_LIMIT, Team
from hosts.volumes.blocks import BLOCK_BYTES
from sandboxes.disk_samples import latest
from sandboxes.history import Moment
from sandboxes.models import Sandbox, Snapshot, Template
from sandboxes.quantities import format_memory

_NANODOLLAR = Decimal("0.000000001")


def instant(at: datetime) -> str:
    """Return an instant as RFC 3339 in UTC."""
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")


def claim_body(sandbox: Sandbox) -> dict[str, Any]:
    """Return the answer to a claim."""
    return {
        "sandbox_id": sandbox.id,
        "status": sandbox.wire_status,
        "template": sandbox.template_name,
        "memory": format_memory(sandbox.memory_bytes),
        **_runtime(sandbox),
    }


def summary_body(sandbox: Sandbox, cost_usd: Decimal) -> dict[str, Any]:
    """Return a sandbox as a list shows it."""
    return {
        "id": sandbox.id,
        "template_id": sandbox.template_name,
        "status": sandbox.wire_status,
        "paused": sandbox.is_paused,
        "runtime_generation": sandbox.runtime_generation,
        "memory": format_memory(sandbox.memory_bytes),
        "cost_usd": _dollars(cost_usd),
        "created_at": instant(sandbox.created_at),
        "updated_at": instant(sandbox.updated_at),
        **deadlines(sandbox),
    }


def sandbox_body(sandbox: Sandbox, cost_usd: Decimal) -> dict[str, Any]:
    """Return a sandbox in full."""
    body = summary_body(sandbox, cost_usd) | {
        "team_id": str(sandbox.team_id),
        "auto_resume": sandbox.auto_resume,
        "claimed_at": instant(sandbox.claimed_at),
        "services": [],
        "resources": {"memory": format_memory(sandbox.memory_bytes)},
        "storage": storage_body(sandbox),
        **_runtime(sandbox),
    }
    return body | _present(
        {
            "user_id": str(sandbox.created_by_id) if sandbox.created_by_id else None,
            "parent_id": sandbox.parent_id,
            "snapshot_id": sandbox.snapshot_id,
            "disk": disk_body(sandbox),
            "health": sandbox.health or None,
            "last_error": sandbox.last_error or None,
        }
    )


def disk_body(sandbox: Sandbox) -> dict[str, Any] | None:
    """Return how full the disk was when it was last measured; None before that."""
    sample = latest(sandbox)
    if sample is None:
        return None
    return {
        "used_bytes": sample.used_bytes,
        "size_bytes": sample.size_bytes,
        "ceiling_bytes": sample.ceiling_bytes,
        "stored_bytes": sample.stored_bytes,
        "measured_at": instant(sample.measured_at),
    }


def storage_body(sandbox: Sandbox) -> dict[str, int]:
    """Return what the sandbox keeps, and what its last commit and start moved, in bytes."""
    head = sandbox.volume.head
    run = sandbox.runs.first()
    is_own = head is not None and head.volume_id == sandbox.volume_id
    return {
        "generation": head.number if head and is_own else 0,
        "stored_bytes": head.stored_bytes if head and is_own else 0,
        "uploaded_bytes": head.uploaded_bytes if head and is_own else 0,
        "fetched_bytes": run.fetched_bytes if run else 0,
    }


def status_body(sandbox: Sandbox) -> dict[str, Any]:
    """Return what of a sandbox changes by itself."""
    body = {
        "sandbox_id": sandbox.id,
        "template_id": sandbox.template_name,
        "team_id": str(sandbox.team_id),
        "status": sandbox.wire_status,
        "claimed_at": instant(sandbox.claimed_at),
        "created_at": instant(sandbox.created_at),
        **_runtime(sandbox),
        **deadlines(sandbox),
    }
    user_id = str(sandbox.created_by_id) if sandbox.created_by_id else None
    return body | _present({"user_id": user_id, "health": sandbox.health or None})


def deadlines(sandbox: Sandbox) -> dict[str, str]:
    """Return the limits that are on; one that is off is absent."""
    ends = {"expires_at": sandbox.expires_at, "hard_expires_at": sandbox.hard_expires_at}
    return {name: instant(at) for name, at in ends.items() if at is not None}


def template_body(template: Template) -> dict[str, Any]:
    """Return a template; one without a `status` is ready."""
    body: dict[str, Any] = {
        "template_id": template.template_id,
        "scope": "public" if template.team_id is None else "team",
        "spec": template.spec,
        "created_at": instant(template.created_at),
        "updated_at": instant(template.updated_at),
    }
    if template.team_id is not None:
        body["team_id"] = str(template.team_id)
    if template.creation or not template.is_ready:
        body["status"] = {"creation": _creation_body(template)}
    return body


def _creation_body(template: Template) -> dict[str, Any]:
    """Return how far a template is that is made from a sandbox or an upload."""
    state = template.creation or Template.Creation.CREATING
    body: dict[str, Any] = {
        "state": str(state),
        "stage": "publishing" if template.captured_at else "capturing",
        "startedAt": instant(template.created_at),
    }
    if template.captured_at:
        body["capturedAt"] = instant(template.captured_at)
    if template.completed_at:
        body["completedAt"] = instant(template.completed_at)
    if state == Template.Creation.FAILED:
        body |= {"reason": "capture_failed", "message": template.creation_error}
    return body


def snapshot_body(snapshot: Snapshot) -> dict[str, Any]:
    """Return a snapshot, its generation read along with it."""
    assert snapshot.generation is not None
    body = {
        "id": snapshot.id,
        "sandbox_id": snapshot.sandbox_id,
        "created_at": instant(snapshot.created_at),
        "generation": snapshot.generation.number,
        "size_bytes": snapshot.generation.size_bytes,
    }
    return body | _present(
        {
            "name": snapshot.name or None,
            "description": snapshot.description or None,
            "expires_at": instant(snapshot.expires_at) if snapshot.expires_at else None,
        }
    )


def moment_body(moment: Moment) -> dict[str, Any]:
    """Return one generation of a sandbox's history."""
    generation = moment.generation
    return {
        "generation": generation.number,
        "kind": generation.kind,
        "created_at": instant(generation.created_at),
        "size_bytes": generation.size_bytes,
        "changed_bytes": generation.blocks_changed * BLOCK_BYTES,
        "uploaded_bytes": generation.uploaded_bytes,
        "stored_bytes": generation.stored_bytes,
        "restorable": True,
        "is_current": moment.is_current,
        "snapshots": moment.snapshot_ids,
    }


_DEFAULT_LIMITS = {
    "active_sandboxes": DEFAULT_RUNNING_LIMIT,
    "paused_sandboxes": DEFAULT_PAUSED_LIMIT,
}
_UNLIMITED = {
    "sandbox_claims": ("rate", "claims"),
    "api_requests": ("rate", "requests"),
    "network_egress_bytes": ("rate", "bytes"),
    "network_ingress_bytes": ("rate", "bytes"),
}

QUOTA_DIMENSIONS = ("active_sandboxes", "paused_sandboxes", *_UNLIMITED)


def quota_bodies(team: Team) -> list[dict[str, Any]]:
    """Return what the team may have and has, in each dimension. Reads the database."""
    mine = Sandbox.objects.of(team)
    enforced = {
        "active_sandboxes": (mine.active().count(), team.running_limit),
        "paused_sandboxes": (mine.asleep().count(), team.paused_limit),
    }
    capacities = [
        _quota_body(team, name, current=current, limit=limit)
        for name, (current, limit) in enforced.items()
    ]
    return capacities + [_unlimited_body(team, name) for name in _UNLIMITED]


def _quota_body(team: Team, dimension: str, *, current: int, limit: int) -> dict[str, Any]:
    is_default = limit == _DEFAULT_LIMITS[dimension]
    return {
        "team_id": str(team.id),
        "dimension": dimension,
        "kind": "capacity",
        "limit_value": limit,
        "interval_ms": None,
        "burst_value": None,
        "current": current,
        "remaining": max(0, limit - current),
        "unlimited": False,
        "unit": "count",
        "source": "region_default" if is_default else "team_override",
    }


def _unlimited_body(team: Team, dimension: str) -> dict[str, Any]:
    kind, unit = _UNLIMITED[dimension]
    return {
        "team_id": str(team.id),
        "dimension": dimension,
        "kind": kind,
        "limit_value": None,
        "interval_ms": None,
        "burst_value": None,
        "current": None,
        "remaining": None,
        "unlimited": True,
        "unit": unit,
        "source": "unlimited",
    }


def _runtime(sandbox: Sandbox) -> dict[str, str]:
    """Return the runtime's name under both names: older clients need the second."""
    runtime_id = "" if sandbox.is_paused else sandbox.runtime_id
    return {"runtime_id": runtime_id, "pod_name": runtime_id}


def _present(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _dollars(amount: Decimal) -> str:
    return format(amount.quantize(_NANODOLLAR), "f")
