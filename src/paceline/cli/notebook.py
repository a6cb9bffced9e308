"""The notebook extension: `%load_ext paceline` to `%unload_ext paceline` is one profile."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from paceline.records import RunFolder, default_name

OUT = "runs"

_running = ExitStack()
"""Ends the profile of this kernel."""


def start(shell: Any) -> None:
    """`shell` is that of IPython."""
    from paceline.cli.profile import present
    from paceline.profiler import session
    from paceline.profiler.program import profile

    stop()
    with ExitStack() as stack:

        @stack.callback
        def show() -> None:
            if measured.result is not None:
                present(RunFolder(measured.folder), measured.result, sys.stdout)

        # The program is the same for all notebooks: the launcher of the kernel.
        name = default_name(Path(OUT), "notebook", "profile")
        measured = stack.enter_context(profile(out=OUT, name=name))
        active = session.active()
        if active is not None:

            def divide_cells(_: object) -> None:
                active.divide_cells()

            for event in ("pre_run_cell", "post_run_cell"):
                shell.events.register(event, divide_cells)
                stack.callback(shell.events.unregister, event, divide_cells)
        _running.enter_context(stack.pop_all())


def stop() -> None:
    _running.close()
