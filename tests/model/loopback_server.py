"""A package index and a hub on this machine's loopback, for the clients that really fetch."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class LoopbackServer(ThreadingHTTPServer):
    """Serves what `pages` holds, by path without its query. `stalled` ones send half and then wait for the client to
    go away, which sets `left`."""

    daemon_threads = True

    def __init__(self) -> None:
        self.pages: dict[str, bytes] = {}
        self.headers: dict[str, dict[str, str]] = {}
        self.refused: dict[str, tuple[int, dict[str, str]]] = {}  # path -> status and headers
        self.stalled: set[str] = set()
        self.asked: list[tuple[str, str]] = []
        self.left = threading.Event()
        super().__init__(("127.0.0.1", 0), Answer)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    server: LoopbackServer

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append((self.command, path))
        if path not in self.server.pages:
            status, headers = self.server.refused.get(path, (404, {}))
            self.answer(status, headers, b"")
            return
        body = self.server.pages[path]
        self.answer(200, self.server.headers.get(path, {}), body)
        if self.command == "HEAD":
            return
        if path in self.server.stalled:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.connection.recv(1)  # nothing more is asked: it ends when the client does
            self.server.left.set()
            self.close_connection = True
        else:
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[LoopbackServer]:
    with LoopbackServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def put_wheel(server: LoopbackServer, name: str, content: bytes) -> None:
    """`name` is a wheel's file name; its project's page lists it alone."""
    project = name.partition("-")[0].replace("_", "-")
    digest = hashlib.sha256(content).hexdigest()
    page = f'<!DOCTYPE html><html><body><a href="/files/{name}#sha256={digest}">{name}</a></body></html>'
    server.pages[f"/simple/{project}/"] = page.encode()
    server.headers[f"/simple/{project}/"] = {"Content-Type": "text/html"}
    server.pages[f"/files/{name}"] = content


COMMIT = "0123456789abcdef0123456789abcdef01234567"

REPO = "some-org/tiny-model"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "model.safetensors": bytes(range(256)) * 400,
    "tokenizer.json": b'{"version": "1.0"}',
}


def put_model(server: LoopbackServer, repo_id: str, files: dict[str, bytes]) -> None:
    """A repository of the hub with one commit."""
    listing = [{"type": "file", "path": name, "size": len(body), "oid": oid(body)} for name, body in files.items()]
    siblings = [{"rfilename": name, "size": len(body), "blobId": oid(body)} for name, body in files.items()]
    info = {"_id": "1", "id": repo_id, "modelId": repo_id, "sha": COMMIT, "private": False, "siblings": siblings}
    for path in (f"/api/models/{repo_id}", f"/api/models/{repo_id}/revision/main"):
        server.pages[path] = json.dumps(info).encode()
    server.pages[f"/api/models/{repo_id}/tree/{COMMIT}"] = json.dumps(listing).encode()
    for name, body in files.items():
        for revision in ("main", COMMIT):
            path = f"/{repo_id}/resolve/{revision}/{name}"
            server.pages[path] = body
            server.headers[path] = {"ETag": f'"{oid(body)}"', "X-Repo-Commit": COMMIT}


def oid(body: bytes) -> str:
    return hashlib.sha1(body).hexdigest()
