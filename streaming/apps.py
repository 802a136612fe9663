"""The streaming app: chat turns that never hang."""

from django.apps import AppConfig


class StreamingConfig(AppConfig):
    name = "streaming"
    verbose_name = "Chat"
