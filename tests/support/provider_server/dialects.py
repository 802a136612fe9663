"""The three dialects: which texts a request carries, and what each answers when no script says otherwise."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .log import Call, Kind
from .vectors import base64_of, json_floats_of, to_base64, vector_of
from .wire import to_json

Item = dict[str, Any]
Transform = Callable[[list[Item]], list[Any]]


@dataclass(frozen=True)
class Embedding:
    """How an embedding reply differs from the default one.

    `transform` alters the list of items `{"object", "index", "embedding": list[float]}`, the same in every dialect,
    before it is written; `encoding` forces "float" or "base64" whatever the request asked for.
    """

    dimensions: int | None = None
    transform: Transform | None = None
    encoding: str | None = None


def kind_of(method: str, path: str) -> Kind:
    if method != "POST":
        return "other"
    if path.endswith("/chat/completions"):
        return "chat"
    return "embedding" if _is_embedding(path) else "other"


def texts_of(kind: Kind, body: Any) -> tuple[str, ...]:
    """The texts of an embedding request in any dialect, or the contents of chat messages."""
    if not isinstance(body, dict):
        return ()
    if kind == "chat":
        return tuple(_content(message.get("content")) for message in body.get("messages", ()))
    if "requests" in body:
        return tuple(_content(request["content"]["parts"]) for request in body["requests"])
    texts = body.get("input", ())
    return (texts,) if isinstance(texts, str) else tuple(str(text) for text in texts)


def embedding_body(call: Call, dimensions: int, change: Embedding) -> bytes:
    """The JSON body that answers an embedding call; `dimensions` is what the server gives when nobody asks."""
    size = change.dimensions or _asked_dimensions(call.body) or dimensions
    encoding = change.encoding or _asked_encoding(call)
    if change.transform is None:
        items = [_encoded(text, size, encoding) for text in call.texts]
        return _written_fast(call, items)
    plain: list[Item] = [
        {"object": "embedding", "index": index, "embedding": vector_of(text, size).tolist()}
        for index, text in enumerate(call.texts)
    ]
    return _written(call, [_with_encoding(item, encoding) for item in change.transform(plain)])


def catalogue(path: str, models: Sequence[str]) -> Any:
    """The answer to a GET, or None where no dialect has such a path."""
    if path == "/api/version":
        return {"version": "0.12.6"}
    if path == "/api/tags":
        return {"models": [{"name": name, "model": name} for name in models]}
    if path == "/v1beta/models":
        return {"models": [{"name": f"models/{name}"} for name in models]}
    if path.endswith("/models"):
        return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "scripted"} for name in models]}
    return None


def _is_embedding(path: str) -> bool:
    return path == "/api/embed" or path.endswith(("/embeddings", ":batchEmbedContents"))


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or ())


def _asked_dimensions(body: Any) -> int | None:
    asked: int | None = body.get("dimensions")
    if "requests" in body:
        asked = next((request.get("outputDimensionality") for request in body["requests"]), None)
    return asked


def _asked_encoding(call: Call) -> str:
    return str(call.body.get("encoding_format") or "float") if call.path.endswith("/embeddings") else "float"


def _encoded(text: str, dimensions: int, encoding: str) -> str:
    return f'"{base64_of(text, dimensions)}"' if encoding == "base64" else json_floats_of(text, dimensions)


def _written_fast(call: Call, vectors: list[str]) -> bytes:
    """`_written` for vectors that are JSON already: joining text costs a fiftieth of dumping 12,000 floats."""
    if call.path == "/api/embed":
        items = vectors
    elif "requests" in call.body:
        items = [f'{{"values":{vector}}}' for vector in vectors]
    else:
        items = [
            f'{{"object":"embedding","index":{index},"embedding":{vector}}}' for index, vector in enumerate(vectors)
        ]
    return _written(call, []).replace(b"[]", f"[{','.join(items)}]".encode(), 1)


def _written(call: Call, items: list[Any]) -> bytes:
    if call.path == "/api/embed":
        return to_json({"embeddings": [_vector(item) for item in items], "model": call.body.get("model")})
    if "requests" in call.body:
        return to_json({"embeddings": [{"values": _vector(item)} for item in items]})
    tokens = sum(len(text.split()) for text in call.texts)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return to_json({"object": "list", "data": items, "model": call.body.get("model"), "usage": usage})


def _vector(item: Any) -> Any:
    return item.get("embedding") if isinstance(item, dict) else item


def _with_encoding(item: Any, encoding: str) -> Any:
    vector = _vector(item)
    is_numeric = isinstance(vector, list | np.ndarray) and all(isinstance(number, int | float) for number in vector)
    if not isinstance(item, dict) or not is_numeric:
        return item
    return {**item, "embedding": to_base64(vector) if encoding == "base64" else list(vector)}
