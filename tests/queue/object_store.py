"""A stand-in of S3 in this process, and what tests ask of it."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.request import Request, urlopen

from moto.server import ThreadedMotoServer

Options = dict[str, str]


def options_for(endpoint: str) -> Options:
    return {
        "aws_access_key_id": "key",
        "aws_secret_access_key": "secret",
        "aws_region": "us-east-1",
        "aws_endpoint": endpoint,
        "allow_http": "true",
    }


@contextmanager
def standing_in() -> Iterator[str]:
    """The endpoint of a store."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def new_bucket(endpoint: str) -> str:
    """The URL of a bucket that nobody else uses."""
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    urlopen(Request(f"{endpoint}/{name}", method="PUT")).close()
    return f"s3://{name}"


class Gate:
    """A way to a store that can be shut: then requests are dropped, before or after they act.

    `shut` is "before", "after", or "always": not even dropped. `only`: where the path has this.
    """

    def __init__(self, endpoint: str) -> None:
        gate = self
        self.shut = ""
        self.only = ""
        self.passed: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def pass_on(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                content = self.rfile.read(length)
                while gate.shut_for(self.path) == "always":
                    time.sleep(0.05)
                if gate.shut_for(self.path) == "before":
                    self.close_connection = True
                    return
                headers = {k: v for k, v in self.headers.items() if k.lower() != "host"}
                headers.setdefault("Content-Type", "application/octet-stream")
                request = Request(
                    endpoint + self.path, data=content or None, headers=headers, method=self.command
                )
                status, answered, body = _ask(request)
                gate.passed.append(f"{self.command} {self.path}")
                if gate.shut_for(self.path) == "after":
                    self.close_connection = True
                    return
                self.send_response(status)
                for name, value in answered.items():
                    if name.lower() not in ("connection", "date", "server", "transfer-encoding"):
                        self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = pass_on

            def log_message(self, *_: object) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            def handle_error(self, request: object, client_address: object) -> None:
                """Whoever asked is gone, as it may be."""

        self.server = Quiet(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def shut_for(self, path: str) -> str:
        return self.shut if self.only in path else ""


def _ask(request: Request) -> tuple[int, dict[str, str], bytes]:
    from urllib.error import HTTPError

    try:
        with urlopen(request) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except HTTPError as error:
        return error.code, dict(error.headers), error.read()


@contextmanager
def refusing() -> Iterator[str]:
    """The endpoint of a store to which no key is good enough."""

    class Handler(BaseHTTPRequestHandler):
        def refuse(self) -> None:
            body = (
                b"<?xml version='1.0'?><Error><Code>InvalidAccessKeyId</Code>"
                b"<Message>The key does not exist in our records.</Message></Error>"
            )
            self.send_response(403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = refuse

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
