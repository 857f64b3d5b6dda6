"""Paths of the console's pages of sandboxes and templates."""

from django.urls import path

from sandboxes.web import disk_views, file_views, image_views, snapshot_views, views

urlpatterns = [
    path("", views.home, name="home"),
    path("sandboxes/", views.sandbox_list, name="sandbox-list"),
    path("sandboxes/claim/", views.sandbox_claim, name="sandbox-claim"),
    path("sandboxes/<str:sandbox_id>/", views.sandbox_detail, name="sandbox-detail"),
    path("sandboxes/<str:sandbox_id>/row/", views.sandbox_row, name="sandbox-row"),
    path("sandboxes/<str:sandbox_id>/head/", views.sandbox_head, name="sandbox-head"),
    path(
        "sandboxes/<str:sandbox_id>/terminal/", views.sandbox_terminal, name="sandbox-terminal"
    ),
    path(
        "sandboxes/<str:sandbox_id>/history/",
        snapshot_views.sandbox_history,
        name="sandbox-history",
    ),
    path(
        "sandboxes/<str:sandbox_id>/settings/", views.sandbox_settings, name="sandbox-settings"
    ),
    path("sandboxes/<str:sandbox_id>/disk/", disk_views.sandbox_disk, name="sandbox-disk"),
    path("sandboxes/<str:sandbox_id>/memory/", views.sandbox_memory, name="sandbox-memory"),
    path("sandboxes/<str:sandbox_id>/pause/", views.sandbox_pause, name="sandbox-pause"),
    path("sandboxes/<str:sandbox_id>/resume/", views.sandbox_resume, name="sandbox-resume"),
    path(
        "sandboxes/<str:sandbox_id>/checkpoint/",
        views.sandbox_checkpoint,
        name="sandbox-checkpoint",
    ),
    path("sandboxes/<str:sandbox_id>/delete/", views.sandbox_delete, name="sandbox-delete"),
    path("sandboxes/<str:sandbox_id>/files/", file_views.file_browse, name="sandbox-files"),
    path("sandboxes/<str:sandbox_id>/files/list/", file_views.file_list, name="file-list"),
    path("sandboxes/<str:sandbox_id>/files/view/", file_views.file_view, name="file-view"),
    path("sandboxes/<str:sandbox_id>/files/raw/", file_views.file_raw, name="file-raw"),
    path("sandboxes/<str:sandbox_id>/files/write/", file_views.file_write, name="file-write"),
    path("sandboxes/<str:sandbox_id>/files/mkdir/", file_views.file_mkdir, name="file-mkdir"),
    path("sandboxes/<str:sandbox_id>/files/move/", file_views.file_move, name="file-move"),
    path(
        "sandboxes/<str:sandbox_id>/files/delete/", file_views.file_delete, name="file-delete"
    ),
    path(
        "sandboxes/<str:sandbox_id>/snapshots/",
        snapshot_views.sandbox_snapshots,
        name="sandbox-snapshots",
    ),
    path(
        "sandboxes/<str:sandbox_id>/snapshots/new/",
        snapshot_views.snapshot_create,
        name="snapshot-create",
    ),
    path(
        "sandboxes/<str:sandbox_id>/restore/",
        snapshot_views.sandbox_restore,
        name="sandbox-restore",
    ),
    path("sandboxes/<str:sandbox_id>/fork/", snapshot_views.sandbox_fork, name="sandbox-fork"),
    path(
        "sandboxes/<str:sandbox_id>/template/",
        snapshot_views.template_create,
        name="template-create",
    ),
    path(
        "sandboxes/<str:sandbox_id>/export.qcow2",
        image_views.sandbox_export,
        name="sandbox-export",
    ),
    path(
        "snapshots/<str:snapshot_id>/export.qcow2",
        image_views.snapshot_export,
        name="snapshot-export",
    ),
    path(
        "snapshots/<str:snapshot_id>/delete/",
        snapshot_views.snapshot_delete,
        name="snapshot-delete",
    ),
    path(
        "templates/<str:template_id>/delete/",
        snapshot_views.template_delete,
        name="template-delete",
    ),
    path("templates/", snapshot_views.template_list, name="template-list"),
    path("templates/import/", image_views.template_import, name="template-import"),
]
