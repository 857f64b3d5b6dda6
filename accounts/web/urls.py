"""Paths of the account pages that are not allauth's."""

from django.urls import path

from accounts.web import views

urlpatterns = [
    path("keys", views.key_list, name="key-list"),
    path("keys/<uuid:key_id>/deactivate", views.key_deactivate, name="key-deactivate"),
    path("keys/<uuid:key_id>/delete", views.key_delete, name="key-delete"),
    path("team", views.team_detail, name="team-detail"),
    path("audit", views.audit_list, name="audit-list"),
    path("console/team/switch", views.team_switch, name="team-switch"),
]
