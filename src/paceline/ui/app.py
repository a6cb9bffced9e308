"""The pages and streams of the live page.

    /                  the list of runs and studies, kept up to date
    /run/NAME          one run: curves and phases as they grow
    /report/NAME       the report of a run or study, built when it is asked for
    /compare?run=NAME  several runs side by side
    /stream            the list, whenever it changes      (server-sent events)
    /stream/NAME       what a run has written since       (server-sent events)

Only the hosts that were asked for are answered, so that no foreign page can read records through a
name of its own that leads here.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from html import escape
from importlib import resources

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from paceline.errors import PacelineError
from paceline.report.build import to_document
from paceline.report.collection import collect
from paceline.report.comparison import cells_to_compare
from paceline.report.comparison_output import to_document as comparison_document
from paceline.report.html import to_html
from paceline.ui.library import Library
from paceline.ui.live import Follower

LIST_SECONDS = 1.0
RUN_SECONDS = 0.4
"""How often records are looked at while somebody watches."""
KEEP_ALIVE_SECONDS = 15.0
MOST_COMPARED = 24

TYPES = {"css": "text/css", "js": "text/javascript"}
HEADERS = {
    # Reports carry their style and script inside; nothing is ever fetched from elsewhere.
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline';"
    " script-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def make_app(library: Library, hosts: list[str]) -> Starlette:
    """`hosts`: the names by which the page may be asked for."""
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
        exception_handlers={PacelineError: _refuse},
    )
    app.state.library = library
    return app


async def _refuse(request: Request, error: Exception) -> Response:
    body = _shell("Not found", f"<h1>Not found</h1><p>{escape(str(error))}</p>")
    return HTMLResponse(body, 404, HEADERS)


async def _list_page(request: Request) -> Response:
    body = _page_text("list.html").replace("{folder}", escape(_library(request).root.name))
    return HTMLResponse(_shell("paceline", body, "list.js"), headers=HEADERS)


async def _run_page(request: Request) -> Response:
    name = request.path_params["name"]
    _library(request).path_of(name)
    body = _page_text("run.html").replace("{name}", escape(name))
    return HTMLResponse(_shell(name, body, "run.js"), headers=HEADERS)


async def _page_file(request: Request) -> Response:
    name = request.path_params["name"]
    kind = TYPES.get(name.rpartition(".")[2])
    if kind is None or not name.replace(".", "").isalnum():
        return Response("no such file", 404, HEADERS)
    try:
        return Response(_page_text(name), media_type=kind, headers=HEADERS)
    except FileNotFoundError:
        return Response("no such file", 404, HEADERS)


async def _no_icon(request: Request) -> Response:
    return Response(status_code=204, headers=HEADERS)


async def _list(request: Request) -> Response:
    entries = await run_in_threadpool(_library(request).entries)
    return JSONResponse([entry.to_dict() for entry in entries], headers=HEADERS)


async def _stream_list(request: Request) -> Response:
    library = _library(request)

    async def changes() -> AsyncIterator[str]:
        before, silent = "", 0.0
        while True:
            entries = await run_in_threadpool(library.entries)
            now = json.dumps([entry.to_dict() for entry in entries])
            if now != before:
                before, silent = now, 0.0
                yield f"data: {now}\n\n"
            elif silent > KEEP_ALIVE_SECONDS:
                silent = 0.0
                yield ": still here\n\n"
            silent += LIST_SECONDS
            await asyncio.sleep(LIST_SECONDS)

    return _streaming(changes())


async def _stream_run(request: Request) -> Response:
    follower = Follower(_library(request).path_of(request.path_params["name"]))

    async def changes() -> AsyncIterator[str]:
        silent = 0.0
        while True:
            # Asked before the last look, so that nothing written in between is missed.
            is_over = follower.is_over
            news = await run_in_threadpool(follower.news)
            if news is not None:
                silent = 0.0
                yield f"data: {json.dumps(news)}\n\n"
            elif silent > KEEP_ALIVE_SECONDS:
                silent = 0.0
                yield ": still here\n\n"
            if is_over:
                yield "event: over\ndata: {}\n\n"
                return
            silent += RUN_SECONDS
            await asyncio.sleep(RUN_SECONDS)

    return _streaming(changes())


async def _report(request: Request) -> Response:
    path = _library(request).path_of(request.path_params["name"])
    page = await run_in_threadpool(lambda: to_html(to_document(collect(path))))
    return HTMLResponse(page, headers=HEADERS)


async def _compare(request: Request) -> Response:
    library = _library(request)
    names = request.query_params.getlist("run")[:MOST_COMPARED]
    paths = [str(library.path_of(name)) for name in names]
    if not paths:
        return HTMLResponse(_shell("Compare", "<p>Tick runs in the list first.</p>"), 400, HEADERS)
    page = await run_in_threadpool(lambda: to_html(comparison_document(cells_to_compare(paths))))
    return HTMLResponse(page, headers=HEADERS)


def _streaming(lines: AsyncIterator[str]) -> StreamingResponse:
    return StreamingResponse(lines, media_type="text/event-stream", headers=HEADERS)


def _library(request: Request) -> Library:
    library = request.app.state.library
    assert isinstance(library, Library)
    return library


def _page_text(name: str) -> str:
    return (resources.files("paceline.ui") / "page" / name).read_text("utf-8")


def _shell(title: str, body: str, script: str | None = None) -> str:
    code = f'<script type="module" src="/page/{script}"></script>\n' if script else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<link rel="icon" href="data:,">\n<link rel="stylesheet" href="/page/ui.css">\n'
        f"<title>{escape(title)}</title>\n</head>\n<body>\n<main>\n{body}</main>\n{code}"
        "</body>\n</html>\n"
    )
