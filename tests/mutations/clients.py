"""The mutations of what clients meet before a turn: errors' format, other origins, and who may read the metrics."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

BROWSERS = "tests/project/test_browsers.py"
METRICS = "tests/streaming/test_metrics.py"

CLIENT_MUTATIONS = (
    Mutation(
        "a path or method that is not served is answered with a page",
        "-",
        "project/api_errors.py",
        "    if response.status_code < 400 or is_page:\n",
        "    if response.status_code:\n",
        (BROWSERS, "-k", "openais_shape"),
    ),
    Mutation(
        "pages of other origins may read the admin",
        "-",
        "project/cors.py",
        '_API = ("/v1/", "/api/")',
        '_API = ("/",)',
        (BROWSERS, "-k", "may_read"),
    ),
    Mutation(
        "loopback needs no metrics token",
        "-",
        "streaming/metrics.py",
        "    if settings.METRICS_TOKEN:\n",
        '    if settings.METRICS_TOKEN and sent != b"":\n',
        (METRICS, "-k", "strangers"),
    ),
    Mutation(
        "a proxy on this machine reads the metrics for others",
        "-",
        "streaming/metrics.py",
        " and _is_loopback(_name_in(host))",
        "",
        (METRICS, "-k", "strangers"),
    ),
)
