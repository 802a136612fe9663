"""Routes: the admin, the endpoints of `project.api`, health checks and metrics."""

from django.contrib import admin
from django.urls import path
from django.views.generic import RedirectView

from project.api import api
from project.health import healthz, readyz
from streaming.metrics import metrics

urlpatterns = [
    path("", RedirectView.as_view(pattern_name="admin:index")),
    path("admin/", admin.site.urls),
    path("healthz", healthz),
    path("readyz", readyz),
    path("metrics", metrics),
    path("", api.urls),
]
