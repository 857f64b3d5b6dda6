"""Paths of the endpoints of accounts. They have no `/api/v1` before them."""

from django.urls import path

from accounts.api import views

urlpatterns = [
    path("users/me", views.Me.as_view()),
    path("teams", views.Teams.as_view()),
    path("teams/<uuid:team_id>", views.TeamDetail.as_view()),
    path("api-keys", views.ApiKeys.as_view()),
    path("api-keys/current", views.CurrentApiKey.as_view()),
    path("api-keys/<uuid:key_id>", views.ApiKeyDetail.as_view()),
    path("api-keys/<uuid:key_id>/deactivate", views.ApiKeyDeactivate.as_view()),
]
