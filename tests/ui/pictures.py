"""The pictures of docs/, made again: `make pictures`.

    python -m tests.ui.pictures [--study FOLDER] [--profile FOLDER] [--out docs/images]

The study is the newest of `make demo`; one is run where there is none. Beside it the live page
shows a run with two workers that goes on while it is looked at, and one that diverged. The profile
is one of examples/plain_ddp.py, by default a new one; with a folder, only its picture is made.
"""

from __future__ import annotations

import argparse
import base64
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from selenium.webdriver.support.ui import WebDriverWait

from paceline.report.build import write_report
from tests.support.serving import browser, served

LIMIT_SECONDS = 120
MOST_BYTES = 280_000
"""Of a picture; a larger one has fewer colours."""
QUIET: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


@dataclass(frozen=True)
class Look:
    """How a page is looked at; pictures end with the last section that fits `most` pixels."""

    width: int
    height: int
    scale: float = 1.0
    is_dark: bool = False
    most: int = 2400


LOOKS = {
    "wide": Look(1280, 900),
    "phone": Look(390, 844, scale=2.0, most=2900),
    "dark": Look(1280, 900, is_dark=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--study", type=Path)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    if arguments.profile:
        with tempfile.TemporaryDirectory() as temporary, browser(Path(temporary)) as page:
            take_profile(page, arguments.profile, arguments.out)
        return
    study = arguments.study or newest_demo()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary) / "runs"
        shutil.copytree(study, root / "first-look")
        write_report(root / "first-look")
        diverge(root)
        with going_on(root), served(root) as address, browser(Path(temporary)) as page:
            take_all(page, root, address, arguments.out)
            take_profile(page, profile(root), arguments.out)


def newest_demo() -> Path:
    found = sorted(Path("studies").glob("first-look-*/report.html"))
    if not found:
        subprocess.run([sys.executable, "-m", "paceline", "demo"], check=True)
        found = sorted(Path("studies").glob("first-look-*/report.html"))
    return found[-1].parent


def train(root: Path, *flags: str) -> list[str]:
    command = [sys.executable, "-m", "paceline", "train", "--quiet", "--threads", "1", "--model"]
    return [*command, "lenet", "--batch-size", "64", "--out", str(root), *flags]


def diverge(root: Path) -> None:
    flags = ("--name", "too-fast", "--lr", "1e6", "--iterations", "200")
    subprocess.run(train(root, *flags), check=False, **QUIET)


def profile(root: Path) -> Path:
    """On two cores; call it on a quiet machine, or the page says that it was not."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += ["2", "examples/plain_ddp.py", "--epochs", "40", "--batch-size", "64"]
    own = [sys.executable, "-m", "paceline", "profile", "--quiet", "--trace", "--out", str(root)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*own, "--name", "ddp", "--", *command], check=True, env=environment, **QUIET)
    return root / "ddp"


def take_profile(page: Any, folder: Path, out: Path) -> None:
    """Up to the phases."""
    look = Look(1280, 900, most=2040)
    dress(page, look)
    page.get(f"file://{write_report(folder).page}")
    settle(page, "profile")
    (out / "profile-wide.png").write_bytes(picture(page, look))


@contextmanager
def going_on(root: Path) -> Iterator[None]:
    flags = ["--name", "overlap-of-two", "--strategy", "overlap", "--nproc-per-node", "2"]
    flags += ["--iterations", "4000", "--eval-every", "100", "--optimizer", "adam", "--lr", "2e-3"]
    flags += ["--train-samples", "8192", "--test-samples", "500"]
    run = subprocess.Popen(train(root, *flags), **QUIET)
    try:
        yield
    finally:
        run.terminate()
        run.wait(60)


def take_all(page: Any, root: Path, address: str, out: Path) -> None:
    cells = "first-look/cells/strategy"
    compared = "&".join(f"run={cells}-{name}.r1" for name in ("all-reduce", "ddp", "local-sgd"))
    pages = {
        "report": f"file://{root}/first-look/report.html",
        "ui-compare": f"{address}/compare?{compared}",
        "ui-run": f"{address}/run/overlap-of-two",
        "ui-list": f"{address}/",
    }
    for name, target in pages.items():
        for look in LOOKS:
            dress(page, LOOKS[look])
            page.get(target)
            settle(page, name)
            (out / f"{name}-{look}.png").write_bytes(picture(page, LOOKS[look]))
    complaints = [entry["message"] for entry in page.get_log("browser")]
    if complaints:
        raise SystemExit("\n".join(complaints))


def dress(page: Any, look: Look) -> None:
    size = {"width": look.width, "height": look.height, "deviceScaleFactor": look.scale}
    size["mobile"] = look.width < 500
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if look.is_dark else "light"}
    still = {"name": "prefers-reduced-motion", "value": "reduce"}
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme, still]})


def settle(page: Any, name: str) -> None:
    """Wait for what the server pushes; of the list, tick two runs and leave it so."""
    script = {
        # A study with many runs is closed unless the list is filtered.
        "ui-list": """
            const filter = document.getElementById("filter");
            filter.value = ".r1";
            filter.dispatchEvent(new Event("input"));
            return document.querySelectorAll("tr.cell").length > 5""",
        "ui-run": "return document.querySelectorAll('#test .dot').length > 4",
    }.get(name, "return document.querySelectorAll('svg.chart').length > 2")
    WebDriverWait(page, LIMIT_SECONDS, 0.3).until(lambda _: page.execute_script(script))
    if name == "ui-list":
        page.execute_script(
            "[...document.querySelectorAll('tr.cell input')].slice(1, 3).forEach((b) => b.click())"
        )


def picture(page: Any, look: Look) -> bytes:
    height = page.execute_script(
        """const blocks = "main > *, main section > :not(h2, h3), .grid > *";
        const ends = [...document.querySelectorAll(blocks)]
          .map((one) => Math.ceil(one.getBoundingClientRect().bottom + scrollY) + 12);
        return Math.max(...ends.filter((end) => end <= arguments[0]));""",
        look.most,
    )
    clip = {"x": 0, "y": 0, "width": look.width, "height": height, "scale": 1}
    shot = page.execute_cdp_cmd(
        "Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True}
    )
    whole = Image.open(BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
    exact = pack(whole)
    if len(exact) < MOST_BYTES:
        return exact
    return pack(whole.quantize(256, Image.Quantize.MEDIANCUT, kmeans=3, dither=Image.Dither.NONE))


def pack(image: Image.Image) -> bytes:
    packed = BytesIO()
    image.save(packed, "PNG", optimize=True)
    return packed.getvalue()


if __name__ == "__main__":
    main()
