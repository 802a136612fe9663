"""Settings, each read once from the environment by a strict reader. The README lists the environment variables."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from django.core.exceptions import ImproperlyConfigured
from django.urls import reverse_lazy

from project.env import Env
from project.runtime import embedded

BASE_DIR = Path(__file__).resolve().parent.parent
_env = Env(os.environ)

VAR_DIR = _env.path("VAR_DIR", BASE_DIR / "var")
VAR_DIR.mkdir(parents=True, exist_ok=True)


def _secret_key() -> str:
    """SECRET_KEY, or a key generated at the first start and stored under VAR_DIR, readable only by its owner."""
    given = _env.text("SECRET_KEY")
    if given:
        return given
    kept = VAR_DIR / "secret_key"
    try:
        with open(os.open(kept, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as new:
            new.write(secrets.token_urlsafe(48))
    except FileExistsError:
        pass
    key = kept.read_text().strip()
    if not key:
        raise ImproperlyConfigured(f"{kept} is empty: delete it, or set SECRET_KEY.")
    return key


SECRET_KEY = _secret_key()
DEBUG = _env.flag("DEBUG", default=False)
ALLOWED_HOSTS = list(_env.words("ALLOWED_HOSTS", ("127.0.0.1", "localhost", "[::1]")))
CSRF_TRUSTED_ORIGINS = list(_env.words("CSRF_TRUSTED_ORIGINS"))
CORS_ALLOWED_ORIGINS = _env.origins("CORS_ALLOWED_ORIGINS")

INSTALLED_APPS = [
    "unfold",
    "unfold.contrib.filters",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    # Serves the assets of /api/docs from this machine, which may have no internet access.
    "ninja",
    "embeddings",
    "streaming",
]

MIDDLEWARE = [
    "project.page_middleware.Security",
    "project.static_files.static_files",
    "project.page_middleware.Session",
    "project.page_middleware.Common",
    "project.page_middleware.Csrf",
    "project.page_middleware.Authentication",
    "project.page_middleware.Messages",
    "project.page_middleware.XFrameOptions",
    "project.api_errors.in_openai_shape",
]

LOGIN_URL = "admin:login"
LOGIN_REDIRECT_URL = "admin:index"
ROOT_URLCONF = "project.urls"
ASGI_APPLICATION = "project.asgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]

DATABASES = {"default": _env.database("DATABASE_URL", VAR_DIR / "sluicegate.sqlite3")}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"django.contrib.auth.password_validation.{name}"}
    for name in ("UserAttributeSimilarityValidator", "MinimumLengthValidator", "CommonPasswordValidator")
]

LANGUAGE_CODE = "en"
USE_TZ = True
TIME_ZONE = "UTC"
STATIC_URL = "/static/"
STATIC_ROOT = VAR_DIR / "static"
WHITENOISE_USE_FINDERS = True

# --- Valkey or Redis: the broker, the event logs, the replies to waiting callers ---------------------------------
REDIS_URL = _env.text("REDIS_URL")
EMBEDDED_VALKEY = not REDIS_URL
if EMBEDDED_VALKEY:
    REDIS_URL = embedded.redis_url(VAR_DIR, os.environ)

CELERY_BROKER_URL = embedded.broker_url(VAR_DIR, os.environ) if EMBEDDED_VALKEY else REDIS_URL
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_DEFAULT_QUEUE = "sweeps"
# A turn's wake-up leaves its queue on delivery, without an acknowledgement (decision 12).
CELERY_TASK_QUEUES = {"sweeps": {}, "embeddings": {}, "housekeeping": {}, "chat": {"no_ack": True}}
CELERY_TASK_ROUTES = {
    "embeddings.drain_provider": {"queue": "embeddings"},
    "embeddings.scan_run": {"queue": "sweeps"},
    "streaming.run_turn": {"queue": "chat"},
    "embeddings.*": {"queue": "housekeeping"},
    "streaming.*": {"queue": "housekeeping"},
}
CELERY_WORKER_POOL = "threads"
CELERY_WORKER_CONCURRENCY = 16
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_WORKER_ENABLE_REMOTE_CONTROL = True
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
# Fail fast if a wake-up cannot be sent: the rows have all the state, and beat sends it again.
CELERY_BROKER_TRANSPORT_OPTIONS = {
    "visibility_timeout": 7200,
    "socket_connect_timeout": 2,
    # Without it, publishing to a server that accepts and never replies would block forever.
    "socket_timeout": 5,
    "max_retries": 0,
    "interval_start": 0,
}
CELERY_TASK_PUBLISH_RETRY = False
CELERY_BEAT_SCHEDULE_FILENAME = str(VAR_DIR / "celerybeat-schedule")
CELERY_BEAT_SCHEDULE = {
    "tick": {"task": "embeddings.tick", "schedule": 2.0, "options": {"expires": 10}},
    "start-due": {"task": "embeddings.start_due", "schedule": 30.0, "options": {"expires": 60}},
    "purge": {"task": "embeddings.purge", "schedule": 3600.0, "options": {"expires": 3600}},
    "chat-tick": {"task": "streaming.tick", "schedule": 2.0, "options": {"expires": 10}},
    "chat-purge": {"task": "streaming.purge", "schedule": 3600.0, "options": {"expires": 3600}},
}

# --- Sluicegate ---------------------------------------------------------------------------------------------------
# Leases are short and renewed: with one as long as a call's deadline, a killed worker would stop the lane for minutes.
LEASE_MS = _env.integer("LEASE_MS", 15_000, least=1_000)
LEASE_RENEW_MS = _env.integer("LEASE_RENEW_MS", 5_000, least=100)
LANE_BATCH_MAX_WAIT_MS = _env.integer("LANE_BATCH_MAX_WAIT_MS", 30_000)
BUSY_RETRY_AFTER_MAX_MS = _env.integer("BUSY_RETRY_AFTER_MAX_MS", 120_000, least=1)
BUSY_REQUEUES_MAX = _env.integer("BUSY_REQUEUES_MAX", 10, least=1)
BUSY_TOTAL_MAX_MS = _env.integer("BUSY_TOTAL_MAX_MS", 900_000, least=1)
SWEEP_CONCURRENCY = _env.integer("SWEEP_CONCURRENCY", 2, least=1, most=64)
SCAN_THREADS = _env.integer("SCAN_THREADS", 8, least=1, most=256)
SOURCE_DEADLINE_MS = _env.integer("SOURCE_DEADLINE_MS", 600_000, least=100)
FILE_BYTES_MAX = _env.integer("FILE_BYTES_MAX", 1_000_000, least=1)
# Any local path may be a source with the embedded Valkey only; a server must list the allowed folders.
_source_roots = _env.words("SOURCE_ROOTS")
SOURCE_ROOTS: tuple[Path, ...] | None = (
    tuple(Path(root).expanduser().resolve() for root in _source_roots)
    if _source_roots
    else (None if EMBEDDED_VALKEY else ())
)
RETENTION_DAYS = _env.integer("RETENTION_DAYS", 30, least=1, most=36_500)
SEARCH_CACHE_BYTES = _env.integer("SEARCH_CACHE_BYTES", 512 * 1024 * 1024)

# --- Chat ---------------------------------------------------------------------------------------------------------
CHAT_TURNS_PER_TENANT = _env.integer("CHAT_TURNS_PER_TENANT", 64, least=1)
CHAT_REQUEST_BYTES_MAX = _env.integer("CHAT_REQUEST_BYTES_MAX", 4 * 1024 * 1024, least=1_024)
CHAT_ANSWER_CHARACTERS_MAX = _env.integer("CHAT_ANSWER_CHARACTERS_MAX", 1_000_000, least=1)
CHAT_KNOWLEDGE_ROWS = _env.integer("CHAT_KNOWLEDGE_ROWS", 5, least=1, most=100)
CHAT_KNOWLEDGE_CHARACTERS = _env.integer("CHAT_KNOWLEDGE_CHARACTERS", 4_000, least=100)
# Milliseconds until an unclaimed turn makes its reader check for workers, and until a reply sends its status.
CHAT_CLAIM_WAIT_MS = _env.integer("CHAT_CLAIM_WAIT_MS", 5_000, least=100)
CHAT_STATUS_WAIT_MS = _env.integer("CHAT_STATUS_WAIT_MS", 10_000, least=100)
CHAT_RETRY_BASE_MS = _env.integer("CHAT_RETRY_BASE_MS", 500)
CHAT_HEARTBEAT_MS = _env.integer("CHAT_HEARTBEAT_MS", 10_000, least=100)
EVENT_LOG_TTL_SECONDS = _env.integer("EVENT_LOG_TTL_SECONDS", 3_600, least=60)
METRICS_TOKEN = _env.text("METRICS_TOKEN")
# Django's own limit: pages parse no larger body than the endpoints accept.
DATA_UPLOAD_MAX_MEMORY_SIZE = CHAT_REQUEST_BYTES_MAX

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["stderr"], "level": _env.text("LOG_LEVEL", "WARNING")},
    "loggers": {
        # The client libraries log whole request lines at INFO: a tenant's text stays out of the logs.
        "httpx2": {"level": "WARNING"},
        "openai": {"level": "WARNING"},
    },
}

UNFOLD = {
    "SITE_TITLE": "Sluicegate",
    "SITE_HEADER": "Sluicegate",
    "SITE_SYMBOL": "water_lock",
    "SITE_URL": reverse_lazy("admin:index"),
    "SHOW_VIEW_ON_SITE": False,
    "SHOW_BACK_BUTTON": True,
    "DASHBOARD_CALLBACK": "embeddings.admin.dashboard.add_overview",
    "SIDEBAR": {"navigation": "embeddings.admin.navigation.sections"},
}
