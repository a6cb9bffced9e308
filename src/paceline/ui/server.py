"""The server of the live page.

    /                  the list of runs and studies, updated live
    /run/NAME          one run: curves and phases, updated live
    /report/NAME       the report of a run or study, built on request
    /compare?run=NAME  several runs side by side
    /stream            changes of the list (server-sent events)
    /stream/NAME       new data of a run   (server-sent events)

Only requests for known host names are answered, so that a foreign page cannot read records through
DNS rebinding.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from html import escape
from importlib import resources
from pathlib import Path
from types import FrameType
from urllib.parse import quote

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from paceline.analysis.collection import collect
from paceline.analysis.comparison import read_comparison
from paceline.analysis.run_group import describe_workers
from paceline.errors import PacelineError, RecordsError, UsageError
from paceline.records import RunFolder
from paceline.report.build import to_document
from paceline.report.comparison import comparison_document
from paceline.report.document import Document
from paceline.report.html import script, to_html
from paceline.study.folder import StudyFolder
from paceline.ui.live import Follower, IsClosing, list_changes, run_changes
from paceline.ui.run_index import RunIndex

LOOPBACK = "127.0.0.1"
ALL_INTERFACES = "0.0.0.0"
SIGINT_EXIT_CODE = 130
MAX_COMPARED = 24

STYLES = ("report.css", "chart.css", "ui.css")
"""In this order: the styles of a report, then those of the live page."""
FILES = {
    "report.css": ("paceline.report", "text/css"),
    "chart.css": ("paceline.report", "text/css"),
    "ui.css": ("paceline.ui", "text/css"),
    "list.js": ("paceline.ui", "text/javascript"),
    "run.js": ("paceline.ui", "text/javascript"),
}
"""Static files: their package and media type."""


def _headers() -> dict[str, str]:
    """Whatever a record contains, browsers run no script from it and load nothing external."""
    script_hash = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    return {
        "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline';"
        f" script-src 'self' 'sha256-{script_hash}'; img-src 'self' data:; base-uri 'none';"
        " form-action 'self'; frame-ancestors 'none'",
        "Cross-Origin-Resource-Policy": "same-origin",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }


HEADERS = _headers()


def make_app(index: RunIndex, hosts: list[str], is_closing: IsClosing = lambda: False) -> Starlette:
    """`hosts` are the accepted values of the Host header."""
    app = Starlette(
        routes=[
            Route("/", _list_page),
            Route("/page/{name}", _page_file),
            Route("/favicon.ico", _no_icon),
            Route("/runs", _list),
            Route("/stream", _stream_list),
            Route("/stream/{name:path}", _stream_run),
            Route("/run/{name:path}", _run_page),
            Route("/report/{name:path}", _report),
            Route("/compare", _compare),
        ],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
        exception_handlers={PacelineError: _not_found},
    )
    app.state.index = index
    app.state.is_closing = is_closing
    return app


async def _not_found(request: Request, error: Exception) -> Response:
    text = f"{_CRUMB}<h1>Not found</h1>\n<p>{escape(str(error))}</p>\n"
    return _html(_shell("paceline", text), 404)


async def _list_page(request: Request) -> Response:
    body = _page_text("list.html").replace("{folder}", escape(_index(request).root.name))
    return _html(_shell("paceline", body, "list.js"))


async def _run_page(request: Request) -> Response:
    name = request.path_params["name"]
    path = _index(request).path_of(name)
    if StudyFolder.is_study(path):
        return RedirectResponse(f"/report/{quote(name)}", headers=HEADERS)
    kind, total, facts = await run_in_threadpool(_summary, path)
    # The name is empty if the folder itself is a run.
    title = name or path.name
    texts = {
        "facts": facts, "total": str(total or ""), "title": title, "name": name, "kind": kind,
    }  # fmt: skip
    body = re.sub(r"\{(\w+)\}", lambda mark: escape(texts[mark[1]]), _page_text("run.html"))
    return _html(_shell(title, body, "run.js"))


def _summary(path: Path) -> tuple[str, int | None, str]:
    """The kind of a run, its number of iterations, if configured, and a summary of its settings."""
    try:
        settings = RunFolder(path).read_settings()
    except RecordsError:
        return "", None, ""
    batch_size = settings.global_batch_size
    items = [
        settings.task,
        settings.strategy or "",
        describe_workers(settings),
        f"batch {batch_size}" if batch_size is not None else "",
    ]
    # Non-breaking spaces: lines break only between items.
    facts = " · ".join(item.replace(" ", "\u00a0") for item in filter(None, items))
    return settings.kind, settings.get("iterations"), facts


async def _page_file(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in FILES:
        return Response("no such file", 404, HEADERS)
    return Response(_page_text(name), media_type=FILES[name][1], headers=HEADERS)


async def _no_icon(request: Request) -> Response:
    return Response(status_code=204, headers=HEADERS)


async def _list(request: Request) -> Response:
    entries = await run_in_threadpool(_index(request).entries)
    return JSONResponse([entry.to_dict() for entry in entries], headers=HEADERS)


async def _stream_list(request: Request) -> Response:
    return _streaming(list_changes(_index(request), request.app.state.is_closing))


async def _stream_run(request: Request) -> Response:
    follower = Follower(_index(request).path_of(request.path_params["name"]))
    return _streaming(run_changes(follower, request.app.state.is_closing))


async def _report(request: Request) -> Response:
    path = _index(request).path_of(request.path_params["name"])
    return await _document(lambda: to_document(collect(path)))


async def _compare(request: Request) -> Response:
    index = _index(request)
    names = list(dict.fromkeys(request.query_params.getlist("run")))
    paths = [str(index.path_of(name)) for name in names]
    if not 0 < len(paths) <= MAX_COMPARED:
        advice = f"Select up to {MAX_COMPARED} runs or studies in the list first."
        return _html(_shell("Compare", f"{_CRUMB}<h1>Compare</h1>\n<p>{advice}</p>\n"), 400)
    return await _document(lambda: comparison_document(read_comparison(paths)))


async def _document(make: Callable[[], Document]) -> Response:
    return _html(await run_in_threadpool(lambda: to_html(make(), before=_CRUMB)))


def _html(page: str, status: int = 200) -> Response:
    return HTMLResponse(page, status, HEADERS)


def _streaming(lines: AsyncIterator[str]) -> StreamingResponse:
    return StreamingResponse(lines, media_type="text/event-stream", headers=HEADERS)


def _index(request: Request) -> RunIndex:
    index = request.app.state.index
    assert isinstance(index, RunIndex)
    return index


def _page_text(name: str) -> str:
    package = FILES[name][0] if name in FILES else "paceline.ui"
    return (resources.files(package) / "assets" / name).read_text("utf-8")


_CRUMB = '<p class="crumb"><a href="/">All runs</a></p>\n'


def _shell(title: str, body: str, script: str | None = None) -> str:
    code = f'<script type="module" src="/page/{script}"></script>\n' if script else ""
    styles = "".join(f'<link rel="stylesheet" href="/page/{name}">\n' for name in STYLES)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f'<link rel="icon" href="data:,">\n{styles}'
        f"<title>{escape(title)}</title>\n</head>\n<body>\n<main>\n{body}</main>\n{code}"
        "</body>\n</html>\n"
    )


def serve(folder: Path | str, host: str, port: int) -> None:
    """Serve the live page until Ctrl-C."""
    index = RunIndex(folder)
    listening = _listen(host, port)
    address = f"http://{host}:{listening.getsockname()[1]}/"
    sys.stdout.write(f"{index.root}\n{address}   (Ctrl-C to stop)\n")
    sys.stdout.flush()
    hosts = accepted_hosts(host, listening.getsockname()[0])
    app = make_app(index, hosts, is_closing=lambda: server.should_exit)
    # Streams end at once; a report that is being built gets this many seconds.
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2)
    server = _Server(config)
    with listening, contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listening])
    # Ctrl-C during interpreter shutdown must not print a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class _Server(uvicorn.Server):
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Exit immediately on a second Ctrl-C: the server has no state to lose."""
        if self.should_exit and sig == signal.SIGINT:
            os._exit(SIGINT_EXIT_CODE)
        super().handle_exit(sig, frame)


def accepted_hosts(host: str, address: str) -> list[str]:
    """Accepted values of the Host header, in lower case as browsers send them."""
    return [host.lower(), address, *(["localhost"] if address == LOOPBACK else [])]


def _listen(host: str, port: int) -> socket.socket:
    try:
        listening = socket.create_server((host, port))
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise UsageError(f"port {port} on {host} is in use: choose another --port") from None
        reason = error.strerror if isinstance(error, OSError) else "no such port"
        raise UsageError(
            f"cannot listen on {host} port {port} ({reason}): choose another --port or --host"
        ) from None
    # Check the resolved address: 0 and an empty name mean all interfaces as well.
    if listening.getsockname()[0] == ALL_INTERFACES:
        listening.close()
        raise UsageError(
            f"--host {host}: give one address or name of this machine: the page does not listen"
            " on all interfaces"
        )
    return listening
