"""Paths under `/api/v1/`. Ids are any text: one that is malformed is not found."""

from django.urls import path

from sandboxes.api import (
    context_views,
    file_views,
    image_views,
    quota_views,
    sandbox_views,
    snapshot_views,
    template_views,
)

SANDBOX = "sandboxes/<str:sandbox_id>"
SNAPSHOT = "sandbox-rootfs-snapshots/<str:snapshot_id>"
CONTEXT = f"{SANDBOX}/contexts/<str:context_id>"

urlpatterns = [
    path("sandboxes", sandbox_views.SandboxList.as_view()),
    path(SANDBOX, sandbox_views.SandboxDetail.as_view()),
    path(f"{SANDBOX}/status", sandbox_views.SandboxStatus.as_view()),
    path(f"{SANDBOX}/pause", sandbox_views.SandboxPause.as_view()),
    path(f"{SANDBOX}/resume", sandbox_views.SandboxResume.as_view()),
    path(f"{SANDBOX}/refresh", sandbox_views.SandboxRefresh.as_view()),
    path(f"{SANDBOX}/snapshots", snapshot_views.SandboxSnapshots.as_view()),
    path(f"{SANDBOX}/rootfs/restore", snapshot_views.SandboxRestore.as_view()),
    path(f"{SANDBOX}/rootfs/rebase", snapshot_views.SandboxRebase.as_view()),
    path(f"{SANDBOX}/fork", snapshot_views.SandboxFork.as_view()),
    path(f"{SANDBOX}/history", snapshot_views.SandboxHistory.as_view()),
    path(f"{SANDBOX}/export.qcow2", image_views.SandboxExport.as_view()),
    path(f"{SNAPSHOT}/export.qcow2", image_views.SnapshotExport.as_view()),
    path(SNAPSHOT, snapshot_views.SnapshotDetail.as_view()),
    path(f"{SANDBOX}/contexts", context_views.ContextList.as_view()),
    path(CONTEXT, context_views.ContextDetail.as_view()),
    path(f"{CONTEXT}/input", context_views.ContextInputView.as_view()),
    path(f"{CONTEXT}/resize", context_views.ContextResizeView.as_view()),
    path(f"{CONTEXT}/signal", context_views.ContextSignalView.as_view()),
    path(
        f"{CONTEXT}/exec",
        context_views.UnavailableContextView.as_view(what="Sending code to an interpreter"),
    ),
    path(
        f"{CONTEXT}/restart",
        context_views.UnavailableContextView.as_view(what="Restarting a context"),
    ),
    path(f"{SANDBOX}/files", file_views.FileContent.as_view()),
    path(f"{SANDBOX}/files/stat", file_views.FileStat.as_view()),
    path(f"{SANDBOX}/files/list", file_views.FileList.as_view()),
    path(f"{SANDBOX}/files/move", file_views.FileMove.as_view()),
    path("templates", template_views.TemplateList.as_view()),
    path("templates/import", image_views.TemplateImport.as_view()),
    path("templates/from-sandbox", snapshot_views.TemplateFromSandboxView.as_view()),
    path("templates/<str:template_id>", template_views.TemplateDetail.as_view()),
    path("quotas", quota_views.QuotaList.as_view()),
    path("quotas/<str:dimension>", quota_views.QuotaDetail.as_view()),
]
