"""Django settings, read from the environment; `tests/settings.py` overrides a few."""

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import django_stubs_ext
from csp.constants import NONCE

from common.units import GiB
from config import env

django_stubs_ext.monkeypatch()

BASE_DIR = Path(__file__).resolve().parents[2]

DEBUG = env.flag("DEBUG", default=False)
SECRET_KEY = env.secret("SECRET_KEY", "unsafe-development-key" if DEBUG else None)
ALLOWED_HOSTS = env.text("ALLOWED_HOSTS", "localhost,127.0.0.1,[::1]").split(",")
PUBLIC_URL = env.text("PUBLIC_URL", "http://127.0.0.1:8000").rstrip("/")
CSRF_TRUSTED_ORIGINS = [PUBLIC_URL]

ROOT_URLCONF = "config.urls"
ASGI_APPLICATION = "config.asgi.application"
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.humanize",
    "django.contrib.messages",
    "django.contrib.postgres",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "allauth",
    "allauth.account",
    "channels",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "rest_framework",
    "accounts",
    "billing",
    "hosts",
    "sandboxes",
]

MIDDLEWARE = [
    "common.api.routing.request_id",  # for API paths where there is no ASGI, as in tests
    "django.middleware.security.SecurityMiddleware",
    "csp.middleware.CSPMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "allauth.account.middleware.AccountMiddleware",
    "accounts.web.middleware.CurrentTeamMiddleware",
]
# The API is called with a bearer token alone: under ASGI its requests go past the console's
# stack and, while they wait, hold no thread (see `common.api.routing.ApiHandler`).
API_MIDDLEWARE = ["common.api.routing.request_id"]
API_PREFIXES = (
    "/api/v1/",
    "/api-keys",
    "/healthz",
    "/metadata",
    "/readyz",
    "/teams",
    "/users/",
)
# What is sent here may be larger than a disk has room for: its view reads it as it comes.
STREAMED_PATHS = re.compile(
    r"/api/v1/sandboxes/[^/]+/files|/api/v1/templates/import|/templates/import/"
)

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "csp.context_processors.nonce",
                "accounts.web.context.teams",
            ],
            "builtins": ["sandboxes.templatetags.console"],
        },
    }
]


def _database(url: str) -> dict[str, object]:
    """Return Django's settings for `postgres://user:password@host:port/name`."""
    parts = urlsplit(url)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": unquote(parts.path.lstrip("/")),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": unquote(parts.hostname or ""),
        "PORT": str(parts.port or ""),
        # Closed at the end of each request: under ASGI a kept connection is not found again
        # by the next request's thread, and they pile up. The pool hands them out instead.
        "CONN_MAX_AGE": 0,
        "OPTIONS": {
            "pool": {"min_size": 1, "max_size": 20, "timeout": 20},
            "options": "-c lock_timeout=10s -c statement_timeout=30s",
        },
    }


DATABASES = {
    "default": _database(env.secret("DATABASE_URL", "postgres://sandkeep@127.0.0.1/sandkeep"))
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

REDIS_URL = env.secret("REDIS_URL", "redis://127.0.0.1:6379/0")
# The queue: Redis, a RabbitMQ URL ("amqp://…"), or "stub" in unit tests.
QUEUE_URL = env.secret("QUEUE_URL", REDIS_URL)
CACHES = {"default": {"BACKEND": "common.cache.SharedRedisCache", "LOCATION": REDIS_URL}}
CHANNEL_LAYERS = {
    "default": {
        "BACKEND": "channels_redis.pubsub.RedisPubSubChannelLayer",
        "CONFIG": {"hosts": [REDIS_URL]},
    }
}

# -- who you are -------------------------------------------------------------------------

AUTH_USER_MODEL = "accounts.User"
AUTHENTICATION_BACKENDS = ["allauth.account.auth_backends.AuthenticationBackend"]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator"},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
]
LOGIN_URL = "account_login"
LOGIN_REDIRECT_URL = "sandbox-list"
ACCOUNT_ADAPTER = "accounts.web.adapter.AccountAdapter"
ACCOUNT_USER_MODEL_USERNAME_FIELD = None
ACCOUNT_LOGIN_METHODS = {"email"}
ACCOUNT_SIGNUP_FIELDS = ["email*", "password1*"]
ACCOUNT_SIGNUP_FORM_CLASS = "accounts.web.forms.SignupDetails"
ACCOUNT_EMAIL_VERIFICATION = env.text("EMAIL_VERIFICATION", "optional")
ACCOUNT_RATE_LIMITS = {
    "login": "30/m/ip",
    "login_failed": "10/m/ip,5/5m/key",
    "signup": "20/m/ip",
    "reset_password": "20/m/ip,5/m/key",
    "confirm_email": "1/m/key",
}
ACCOUNT_PREVENT_ENUMERATION = True
EMAIL_BACKEND = (
    "common.mail.ConsoleAndFileBackend"
    if DEBUG
    else env.text("EMAIL_BACKEND", "django.core.mail.backends.smtp.EmailBackend")
)
EMAIL_HOST = env.text("EMAIL_HOST", "localhost")
EMAIL_PORT = env.integer("EMAIL_PORT", 25)
DEFAULT_FROM_EMAIL = env.text("DEFAULT_FROM_EMAIL", "Sandkeep <no-reply@localhost>")

SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = PUBLIC_URL.startswith("https://")
SESSION_COOKIE_HTTPONLY = True
SECURE_SSL_REDIRECT = False  # ended by the proxy before us
SECURE_HSTS_SECONDS = 31_536_000 if PUBLIC_URL.startswith("https://") else 0
SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
SILENCED_SYSTEM_CHECKS = [
    "security.W005",  # subdomains are for whoever owns the domain to decide
    "security.W008",  # see SECURE_SSL_REDIRECT
    "security.W021",  # so is a browser's preload list
]
X_FRAME_OPTIONS = "DENY"
CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": ["'self'"],
        "script-src": ["'self'", NONCE],
        # Inline style attributes are set by xterm.js and CodeMirror at run time.
        "style-src": ["'self'", "'unsafe-inline'"],
        "img-src": ["'self'", "data:", "blob:"],
        "connect-src": ["'self'", "ws:", "wss:"],
        "frame-ancestors": ["'none'"],
        "base-uri": ["'self'"],
        "form-action": ["'self'"],
    }
}

# -- pages, API --------------------------------------------------------------------------

USE_TZ = True
TIME_ZONE = "UTC"
STATIC_URL = "/static/"
STATICFILES_DIRS = [BASE_DIR / "static"]
STATE_DIR = Path(env.text("STATE_DIR", str(BASE_DIR / "var")))
STATIC_ROOT = STATE_DIR / "static"
WHITENOISE_USE_FINDERS = True
DATA_UPLOAD_MAX_MEMORY_SIZE = 8 * 1024 * 1024

REST_FRAMEWORK = {
    "EXCEPTION_HANDLER": "common.api.errors.handle",
    "DEFAULT_AUTHENTICATION_CLASSES": ["accounts.api.authentication.ApiKeyAuthentication"],
    "DEFAULT_PERMISSION_CLASSES": ["rest_framework.permissions.IsAuthenticated"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["rest_framework.parsers.JSONParser"],
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "UNAUTHENTICATED_USER": None,
}
SPECTACULAR_SETTINGS = {
    "TITLE": "Sandkeep API",
    "DESCRIPTION": "Computers that your users and agents can come back to.",
    "VERSION": "1",
    "SERVE_INCLUDE_SCHEMA": False,
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "REDOC_DIST": "SIDECAR",
}

# -- hosts and object storage --------------------------------------------------------------

REGION_ID = env.text("REGION_ID", "local")
CLUSTER_KEY = env.text("CLUSTER_KEY", "c1")

S3_ENDPOINT_URL = env.text("S3_ENDPOINT_URL", "http://127.0.0.1:8333")
S3_BUCKET = env.text("S3_BUCKET", "sandkeep")
S3_REGION = env.text("S3_REGION", "us-east-1")
S3_PREFIX = env.text("S3_PREFIX", "")
S3_ACCESS_KEY_ID = env.secret("S3_ACCESS_KEY_ID", "")
S3_SECRET_ACCESS_KEY = env.secret("S3_SECRET_ACCESS_KEY", "")

# Name of the host that this process drives; read by a host's worker and gate only.
HOST_NAME = env.text("HOST_NAME", "local")
RUN_DIR = Path(env.text("RUN_DIR", "/run/sandkeep"))
IMAGES_DIR = Path(env.text("IMAGES_DIR", str(STATE_DIR / "images")))
CACHE_BUDGET_BYTES = env.integer("CACHE_BUDGET_BYTES", 10 * GiB)
# What a running disk's writes that are not stored yet may take here, and what its local layer
# of recently read and stored blocks may (0: it has none).
LOG_BUDGET_BYTES = env.integer("LOG_BUDGET_BYTES", 2 * GiB)
LAYER_BUDGET_BYTES = env.integer("LAYER_BUDGET_BYTES", GiB // 2)
DISK_USER = env.text("DISK_USER", "")
SOCKET_GROUP = env.text("SOCKET_GROUP", "")
# Wraps the keys that disks are encrypted with; read by hosts' workers alone. One of: a file
# or a variable with 32 bytes in base64, or a class with the shape of `hosts.keys.MasterKey`.
MASTER_KEY_FILE = env.text("MASTER_KEY_FILE", "")
MASTER_KEY = env.text("MASTER_KEY", "")
MASTER_KEY_CLASS = env.text("MASTER_KEY_CLASS", "")
# Files of the master keys before it, until `manage.py rotate_master_key` is done.
MASTER_KEY_FILE_PREVIOUS = [
    path for path in env.text("MASTER_KEY_FILE_PREVIOUS", "").split(":") if path
]
# An object that no live root names is deleted after this long. Uploads need no grace (see
# `hosts.collection`); whoever still reads a generation that was given up does.
COLLECT_GRACE_S = env.integer("COLLECT_GRACE_S", 900)
LIBVIRT_URI = env.text("LIBVIRT_URI", "qemu:///system")
GUEST_NETWORK = env.text("GUEST_NETWORK", "sandkeep")
GUEST_BRIDGE = env.text("GUEST_BRIDGE", "skbr0")
GUEST_SUBNET = env.text("GUEST_SUBNET", "10.88.0.0/20")
GATE_HOST = env.text("GATE_HOST", "127.0.0.1")
GATE_PORT = env.integer("GATE_PORT", 8022)
GATE_KEY_FILE = env.text("GATE_KEY_FILE", "")
GATE_PUBLIC_KEY = env.text("GATE_PUBLIC_KEY", "")
PLATFORM_KEY_FILE = env.text("PLATFORM_KEY_FILE", "")
PLATFORM_PUBLIC_KEY = env.text("PLATFORM_PUBLIC_KEY", "")
# Under software emulation a core does about a tenth of a real one's work, so a guest's
# CPU quota is multiplied by this there.
EMULATED_CPU_FACTOR = env.integer("EMULATED_CPU_FACTOR", 8)
# How long a request that needs a guest waits for it to wake before it is told to come back.
WAKE_TIMEOUT_S = env.integer("WAKE_TIMEOUT_S", 120)
# How long a snapshot or a fork of a running sandbox is waited for; its upload is in there.
CUT_TIMEOUT_S = env.integer("CUT_TIMEOUT_S", 55)
# How long each commit stays in a sandbox's history, then one a minute, one each 10 minutes.
HISTORY_ALL_S = env.integer("HISTORY_ALL_S", 3_600)
HISTORY_MINUTES_S = env.integer("HISTORY_MINUTES_S", 6 * 3_600)
HISTORY_TEN_MINUTES_S = env.integer("HISTORY_TEN_MINUTES_S", 24 * 3_600)
# How old a write of a running sandbox becomes before it is stored in the background.
COMMIT_EVERY_S = env.integer("COMMIT_EVERY_S", 10)
# The largest image that is taken in as a template.
IMPORT_MAX_BYTES = env.integer("IMPORT_MAX_BYTES", 16 * GiB)
# A host that is silent for this long, while others are heard, is lost: its sandboxes go on
# elsewhere from what was stored last. 0: never; an operator says so in the admin pages.
HOST_LOST_AFTER_S = env.integer("HOST_LOST_AFTER_S", 180)

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s %(message)s"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["console"], "level": env.text("LOG_LEVEL", "INFO")},
    "loggers": {"asyncssh": {"level": "WARNING"}, "httpx": {"level": "WARNING"}},
}
MAIL_FILE = Path(env.text("MAIL_FILE", str(STATE_DIR / "log" / "mail.log")))
