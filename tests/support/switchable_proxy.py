"""An HTTP proxy before one server, which can be told to behave like one in trouble."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODES = ("up", "refuse", "hang", "swallow", "401", "403", "429", "500")
_NOT_FORWARDED = ("connection", "transfer-encoding", "content-length", "keep-alive")


class SwitchableProxy:
    """Forward to a server on 127.0.0.1, or fail in the way that `mode` names.

        up        forward the request and its answer
        refuse    nobody listens: connections are refused, those that were open are cut
        hang      take the request and never answer
        swallow   let the server do what was asked, then cut the connection before the answer
        401 ...   answer with this status; the server is not asked

    Args:
        server_port: where the server is, or will be.
    """

    def __init__(self, server_port: int) -> None:
        self.server_port = server_port
        self.num_requests: Counter[str] = Counter()
        """Requests by mode."""
        self.bad_words: dict[bytes, str] = {}
        """Requests whose path or body holds such a word get the mode named here, whatever `mode`
        is."""
        self._mode = "up"
        self._switched = threading.Condition()
        self._connections: set[socket.socket] = set()
        self._listener: ThreadingHTTPServer | None = None
        self.port = 0
        self._listen()

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def mode(self) -> str:
        return self._mode

    def switch(self, mode: str) -> None:
        """Behave in another way from the next request on; requests that hang are cut."""
        assert mode in MODES
        if mode == "refuse":
            self._stop_listening()
        with self._switched:
            self._mode = mode
            self._switched.notify_all()
        if mode != "refuse" and self._listener is None:
            self._listen()

    def close(self) -> None:
        self.switch("refuse")

    # --- connections ----------------------------------------------------------------------------

    def _listen(self) -> None:
        proxy = self

        class Handler(_Handler):
            owner = proxy

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True
            request_queue_size = 64

            def handle_error(self, request: Any, client_address: Any) -> None:
                """Say nothing: cut connections are what this is for."""

        self._listener = Server(("127.0.0.1", self.port), Handler)
        self.port = int(self._listener.server_address[1])
        threading.Thread(
            target=self._listener.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()

    def _stop_listening(self) -> None:
        if self._listener is None:
            return
        self._listener.shutdown()
        self._listener.server_close()
        self._listener = None
        for connection in list(self._connections):
            _cut(connection)

    def hang(self) -> None:
        """Wait until the mode is another one."""
        with self._switched:
            self._switched.wait_for(lambda: self._mode != "hang")

    def opened(self, connection: socket.socket) -> None:
        self._connections.add(connection)

    def closed(self, connection: socket.socket) -> None:
        self._connections.discard(connection)


def _cut(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """Handle the requests of one connection."""

    protocol_version = "HTTP/1.1"
    owner: SwitchableProxy

    def setup(self) -> None:
        super().setup()
        self.owner.opened(self.connection)

    def finish(self) -> None:
        self.owner.closed(self.connection)
        super().finish()

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""

    def _handle(self) -> None:
        body = self._body()
        mode = self._mode_of(body)
        self.owner.num_requests[mode] += 1
        if mode == "refuse":
            self._cut()
        elif mode == "hang":
            self.owner.hang()
            self._cut()
        elif mode.isdigit():
            self._answer(int(mode), {"Content-Type": "text/plain"}, b"in trouble")
        else:
            status, headers, content = self._forward(body)
            if mode == "swallow":
                self._cut()
            else:
                self._answer(status, headers, content)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = _handle  # noqa: N815

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            pieces = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(pieces)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _mode_of(self, body: bytes) -> str:
        for word, mode in self.owner.bad_words.items():
            if word in self.path.encode() or word in body:
                return mode
        return self.owner.mode

    def _forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        headers = {k: v for k, v in self.headers.items() if k.lower() not in _NOT_FORWARDED}
        server = http.client.HTTPConnection("127.0.0.1", self.owner.server_port, timeout=60)
        try:
            server.request(self.command, self.path, body, headers)
            answer = server.getresponse()
            content = answer.read()
        except OSError:
            return 502, {}, b"no server"
        finally:
            server.close()
        kept = {k: v for k, v in answer.getheaders() if k.lower() not in _NOT_FORWARDED}
        return answer.status, kept, content

    def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _cut(self) -> None:
        self.close_connection = True
        time.sleep(0.01)  # not a busy loop with a client that asks again at once
        _cut(self.connection)
