"""A request whose body is no JSON is told what is wrong with it, and nothing of it is repeated."""

import pytest

BODIES = {
    "cut": (b'{"model": "secret', "Unterminated string starting at, at character 10"),
    "form": (b"model=secret", "Expecting value, at character 0"),
    "gzip": (b"\x1f\x8b\x08secret", "it is not UTF-8"),
    "two": (b"{} {}", "Extra data, at character 3"),
    "not a number": (b'{"n": NaN}', "NaN is not JSON"),
    "deep": (b"[" * 100_000, "nested too deeply"),
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/api/chat/turns"])
@pytest.mark.parametrize(("body", "fault"), BODIES.values(), ids=BODIES.keys())
def test_a_body_that_is_no_json_is_told_why(chat, path, body, fault):
    with chat.http() as client:
        answer = client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "invalid_json"
    assert fault in error["message"]
    assert "secret" not in answer.text
