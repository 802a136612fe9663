"""Pages of other origins: a real browser reads an answer where its origin is listed, and none elsewhere."""

import contextlib
import http.server
import queue
import subprocess
import threading

import httpx2
import pytest

from project.env import Env
from tests.support.chromium import executable
from tests.support.processes import start_web

PAGE = """<script>
const tell = (text) => fetch('/seen', {method: 'POST', body: text});
fetch('%s', {headers: {Authorization: 'Bearer %s', 'X-Anything': '1'}})
  .then(async (reply) => tell('read: ' + reply.status + ' ' + await reply.text()))
  .catch((error) => tell('refused: ' + error));
</script>"""


class PageServer(http.server.ThreadingHTTPServer):
    """An origin of its own on loopback: serves one page, and collects what the page tells of what it saw."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), PageHandler)
        self.page, self.seen = "", queue.Queue()
        self.origin = f"http://127.0.0.1:{self.server_port}"


class PageHandler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(self.server.page.encode())

    def do_POST(self):
        self.server.seen.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.answer(b"")

    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words):
        """Nothing: a test's output is the tests' own."""


@pytest.fixture
def pages():
    with PageServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@contextlib.contextmanager
def browser_at(url, tmp_path):
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
    words = [str(executable()), *flags, f"--user-data-dir={tmp_path}/profile", "--remote-debugging-port=0", url]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as browser:
        try:
            yield
        finally:
            browser.kill()


@pytest.mark.parametrize(
    ("is_listed", "expected"), [(True, "read: 200 {"), (False, "refused: TypeError")], ids=["listed", "twin"]
)
def test_a_page_of_a_listed_origin_reads_the_models(chat, pages, tmp_path, is_listed, expected):
    web, address = start_web(
        "web-cors", CORS_ALLOWED_ORIGINS=pages.origin if is_listed else "https://other.example.com"
    )
    try:
        pages.page = PAGE % (f"{address}/v1/models", chat.key)
        with browser_at(pages.origin, tmp_path):
            assert pages.seen.get(timeout=60).startswith(expected)
    finally:
        web.end()


def test_what_a_page_may_read(chat):
    origin = "https://chat.example.com"
    web, address = start_web("web-cors", CORS_ALLOWED_ORIGINS=origin)
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-stainless-os"}
    try:
        with httpx2.Client(base_url=address, trust_env=False) as client:
            preflight = client.options("/v1/chat/completions", headers={"Origin": origin} | asks)
            assert preflight.status_code == 200
            assert preflight.headers["access-control-allow-origin"] == origin
            assert preflight.headers["access-control-allow-headers"] == asks["Access-Control-Request-Headers"]
            for reply in (
                client.post("/v1/chat/completions", json={}, headers={"Origin": origin}),
                client.post("/v1/chat/completions", content=b" " * 200_000, headers={"Origin": origin}),
                client.get("/v1/nothing", headers={"Origin": origin}),
            ):
                assert reply.status_code in (401, 413, 404)
                assert reply.headers["access-control-allow-origin"] == origin
            for path, asking in (("/v1/models", "https://evil.example.com"), ("/admin/login/", origin)):
                assert "access-control-allow-origin" not in client.get(path, headers={"Origin": asking}).headers
    finally:
        web.end()


@pytest.mark.parametrize("value", ["chat.example.com", "https://a.example.com/", "https://a.example.com/path"])
def test_a_value_that_is_no_origin_stops_the_start(value):
    with pytest.raises(Exception, match="CORS_ALLOWED_ORIGINS must list origins"):
        Env({"CORS_ALLOWED_ORIGINS": value}).origins("CORS_ALLOWED_ORIGINS")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "not_found"),
        ("POST", "/v1/models/", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/chat/completions", 405, "method_not_allowed"),
        ("PUT", "/api/chat/turns", 405, "method_not_allowed"),
        ("GET", "/api/nothing", 404, "not_found"),
    ],
)
def test_errors_of_no_endpoint_have_openais_shape(chat, method, path, status, code):
    with chat.http() as client:
        reply = client.request(method, path)
    assert reply.status_code == status
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert reply.json()["error"]["code"] == code
    assert ("allow" in reply.headers) == (status == 405)


def test_a_page_that_is_missing_stays_a_page(chat):
    with chat.http() as client:
        assert "text/html" in client.get("/admin-nothing").headers["content-type"]
