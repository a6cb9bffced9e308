"""The pages, asked for as a browser does, and by others who should not."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit
from urllib.request import urlopen

import pytest

from paceline.ui.run_index import RunIndex
from paceline.ui.server import accepted_hosts
from tests.report.test_study_comparison import write_study
from tests.support.records import FakeRun, write_run
from tests.support.serving import served


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    root = tmp_path_factory.mktemp("runs")
    write_run(root, FakeRun(name="one"))
    write_run(root, FakeRun(name="two"))
    write_run(root, FakeRun(name="three")).rename(root / NASTY)
    for name, seconds in (("before", 0.020), ("after", 0.010)):
        write_study(root / "studies" / name, {"ring": (seconds, (0.99, 1.0, 1.01))})
    outside = write_run(tmp_path_factory.mktemp("outside"), FakeRun(name="secret"))
    (root / "link").symlink_to(outside)
    with served(root) as address:
        yield address


def ask(page: str, target: str, host: str | None = None) -> tuple[int, str]:
    place = urlsplit(page)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=30)
    try:
        connection.putrequest("GET", target, skip_host=True)
        connection.putheader("Host", host or place.netloc)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_the_list_names_the_runs(page: str) -> None:
    status, body = ask(page, "/runs")
    assert status == 200
    runs = [entry["name"] for entry in json.loads(body) if not entry["name"].startswith("studies/")]
    assert set(runs) == {"one", "two", NASTY}


NASTY = "<img src=x onerror=alert(1)>"


@pytest.mark.parametrize("kind", ["run", "report"])
def test_a_name_is_text_and_never_part_of_the_page(page: str, kind: str) -> None:
    status, body = ask(page, f"/{kind}/{quote(NASTY)}")
    assert status == 200
    assert "&lt;img" in body
    assert "<img" not in body


def test_a_browser_runs_no_script_but_those_of_the_pages(page: str) -> None:
    with urlopen(f"{page}/report/one", timeout=30) as answer:
        policy, body = answer.headers["Content-Security-Policy"], answer.read()
    script = body.partition(b"<script>")[2].partition(b"</script>")[0]
    known = base64.b64encode(hashlib.sha256(script).digest()).decode()
    assert f"script-src 'self' 'sha256-{known}';" in policy


def test_a_second_ctrl_c_exits_silently(tmp_path: Path) -> None:
    write_run(tmp_path, FakeRun("one", status="unfinished"))
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "ui", str(tmp_path), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    address = process.stdout.readline().split()[0]
    with urlopen(f"{address}stream/one", timeout=30) as stream:
        stream.readline()
        for _ in range(500):
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.02)
                break
        process.kill()
        expected, complaints = process.communicate(timeout=20)
    assert expected + complaints == ""
    # A shell tells both as 130: ended by itself, or by the signal once it was leaving.
    assert process.returncode in (130, -signal.SIGINT)


def test_who_watches_does_not_keep_the_server_from_ending(tmp_path: Path) -> None:
    write_run(tmp_path, FakeRun("one", status="unfinished"))
    with served(tmp_path) as address:
        streams = [urlopen(f"{address}/{path}", timeout=30) for path in ("stream", "stream/one")]
        for stream in streams:
            assert stream.readline().startswith(b"data: ")
    for stream in streams:
        # The end of the answer as it should be: one that was cut off raises.
        stream.read()
        stream.close()


@pytest.mark.parametrize("target", ["/", "/run/one", "/report/one", "/compare?run=one&run=two"])
def test_its_pages_open(page: str, target: str) -> None:
    status, body = ask(page, target)
    assert status == 200
    assert "</html>" in body


def test_studies_are_compared_cell_by_cell(page: str) -> None:
    status, body = ask(page, "/compare?run=studies/before&run=studies/after")
    assert status == 200
    row = "<td>with ring</td><td class=n>20.00\u00a0ms</td><td class=n>10.00\u00a0ms</td>"
    assert row in body
    assert "<td class=n>0.500</td>" in body


@pytest.mark.parametrize(
    "target",
    [
        "/run/..",
        "/run/%00",
        "/run/../secret",
        "/report/%2e%2e/secret",
        "/report/..%2fsecret",
        "/report//etc",
        "/report/link",
        "/stream/link",
        "/compare?run=../secret",
        "/page/..%2fapp.py",
        "/page/app.py",
    ],
)
def test_foreign_paths_are_rejected(page: str, target: str) -> None:
    assert ask(page, target)[0] == 404


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "127.0.0.1@evil", "[::1]:1", " "],
)
def test_foreign_names_for_this_address_are_rejected(page: str, host: str) -> None:
    assert ask(page, "/runs", host)[0] == 400


def test_the_stream_of_an_ended_run_is_complete_and_ends(page: str) -> None:
    status, body = ask(page, "/stream/one")
    assert status == 200
    first = json.loads(body.split("\n")[0].removeprefix("data: "))
    assert first["points"]
    assert body.endswith('event: over\ndata: {"status": "finished", "cause": ""}\n\n')


@pytest.mark.parametrize(
    ("host", "address", "names"),
    [
        ("LocalHost", "127.0.0.1", {"localhost", "127.0.0.1"}),
        ("127.1", "127.0.0.1", {"127.1", "127.0.0.1", "localhost"}),
        ("Desk", "10.0.0.7", {"desk", "10.0.0.7"}),
    ],
)
def test_the_page_answers_to_its_names_as_browsers_write_them(
    host: str, address: str, names: set[str]
) -> None:
    assert set(accepted_hosts(host, address)) == names


@pytest.mark.parametrize("host", ["0.0.0.0", "0", ""])
def test_listening_everywhere_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], host: str
) -> None:
    from paceline.cli import main

    assert main(["ui", str(tmp_path), "--host", host, "--port", "0"]) == 2
    message = f"--host {host}: give one address or name of this machine"
    assert message in capsys.readouterr().err


def test_a_port_in_use_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from paceline.cli import main

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["ui", str(tmp_path), "--port", str(port)]) == 2
    message = f"port {port} on 127.0.0.1 is in use: choose another --port"
    assert capsys.readouterr().err == f"paceline: error: {message}\n"


def test_the_page_can_be_opened_before_there_is_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("paceline.ui.server.serve", lambda folder, *_: RunIndex(folder))
    assert main(["ui"]) == 0


def test_a_missing_folder_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from paceline.cli import main

    assert main(["ui", str(tmp_path / "nowhere")]) == 2
    assert "is not a folder" in capsys.readouterr().err
