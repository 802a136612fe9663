"""The ASGI entry point: `uvicorn project.asgi:application`."""

import os

from django.conf import settings
from django.core.asgi import get_asgi_application

from project.bounded_bodies import bounded_bodies

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")

application = bounded_bodies(get_asgi_application(), settings.CHAT_REQUEST_BYTES_MAX)
