"""Every URL that the site answers.

The API's own paths are those under settings.API_PREFIXES; all others are pages.
"""

from django.contrib import admin
from django.urls import include, path
from drf_spectacular.views import SpectacularAPIView, SpectacularSwaggerSplitView

from accounts.web.signup import signup
from common.api.health import Alive, Metadata, Ready

urlpatterns = [
    path("api/v1/", include("sandboxes.api.urls")),
    path("", include("accounts.api.urls")),
    path("healthz", Alive.as_view()),
    path("readyz", Ready.as_view()),
    path("metadata", Metadata.as_view()),
    path(
        "api/schema",
        SpectacularAPIView.as_view(authentication_classes=(), permission_classes=()),
        name="schema",
    ),
    path(
        "api/docs",
        SpectacularSwaggerSplitView.as_view(authentication_classes=(), permission_classes=()),
        name="docs",
    ),
    path("accounts/signup/", signup, name="account_signup"),
    path("accounts/", include("allauth.urls")),
    path("admin/", admin.site.urls),
    path("", include("accounts.web.urls")),
    path("", include("billing.web.urls")),
    path("", include("sandboxes.web.urls")),
]
handler429 = "accounts.web.limits.too_many_requests"
