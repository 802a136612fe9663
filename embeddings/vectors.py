"""A column for one embedding vector: bytes of float32 on SQLite, pgvector's `vector` on PostgreSQL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from django.db import models
from pgvector import Vector

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper
    from django.db.backends.utils import CursorWrapper


class VectorField(models.Field):  # type: ignore[type-arg]
    """Holds `float32[dimensions]`; each generation has its own number of dimensions."""

    description = "An embedding vector"

    def db_type(self, connection: BaseDatabaseWrapper) -> str:
        return "vector" if connection.vendor == "postgresql" else "BLOB"

    def get_db_prep_value(self, value: Any, connection: BaseDatabaseWrapper, prepared: bool = False) -> Any:
        return None if value is None else database_value(value, connection)

    def from_db_value(self, value: Any, expression: Any, connection: BaseDatabaseWrapper) -> np.ndarray | None:
        return None if value is None else read_value(value)


def database_value(vector: np.ndarray, connection: BaseDatabaseWrapper) -> Any:
    """The vector as a statement parameter for this database."""
    array = np.ascontiguousarray(vector, dtype=np.float32)
    return Vector(array).to_text() if connection.vendor == "postgresql" else array.tobytes()


def bind_in_binary(cursor: CursorWrapper) -> None:
    """Makes this PostgreSQL cursor send arrays in binary: formatting them as text costs more than storing them."""
    from pgvector.psycopg.vector import VectorBinaryDumper

    cursor.adapters.register_dumper(np.ndarray, VectorBinaryDumper)


def read_value(value: Any) -> np.ndarray:
    """`float32[dimensions]` from the database's value."""
    if isinstance(value, str):
        return np.fromstring(value[1:-1], sep=",", dtype=np.float32)
    return np.frombuffer(value, dtype=np.float32)
