"""What the page of a profiled script shows besides curves: its findings and post-mortems.

While the script runs, findings are those of its records so far.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from paceline.analysis.run import Run, open_run
from paceline.analysis.script.findings import find_in_script, is_fault
from paceline.errors import PacelineError
from paceline.profiler import POST_MORTEM_FILE
from paceline.profiler.collection import read_so_far
from paceline.records import RunFolder, open_record
from paceline.report.wording import post_mortem
from paceline.report.wording.scripts import account

FINDINGS_SECONDS = 5.0
"""Interval at which the records of a running script are analyzed."""
IDLE_RATIO = 20
"""Analyzing takes at most 1/20 of a core, because the script may need it."""
DAMAGED = (PacelineError, OSError, LookupError, TypeError, ValueError, AttributeError)
"""What incomplete or damaged records raise."""


class ScriptState:
    """Reads the records of a profile again when they have changed; of other runs, nothing."""

    def __init__(self, path: Path) -> None:
        self._folder = RunFolder(path)
        self._is_profile: bool | None = None
        """None: config.json was not read yet."""
        self._next = 0.0
        self._has_result = False
        self._shown: dict[str, Any] = {
            "findings": [],
            "post_mortems": [],
            "post_mortem_title": "",
        }

    def read_update(self) -> dict[str, Any]:
        """`findings`, `post_mortems` and `post_mortem_title` if they have changed."""
        if self._is_profile is None:
            self._is_profile = self._read_kind() == "profile"
        if self._has_result or not self._is_profile:
            return {}
        self._has_result = self._folder.result_file.is_file()
        if monotonic() < self._next and not self._has_result:
            return {}
        began = monotonic()
        try:
            found = self._read()
        except DAMAGED:
            found = {}
        ended = monotonic()
        self._next = ended + max(FINDINGS_SECONDS, IDLE_RATIO * (ended - began))
        changed = {key: value for key, value in found.items() if value != self._shown[key]}
        self._shown |= changed
        return changed

    def _read_kind(self) -> str:
        try:
            return self._folder.read_settings().kind
        except PacelineError:
            return ""

    def _read(self) -> dict[str, Any]:
        if self._has_result:
            run = open_run(self._folder.path)
            reports = (run.result or {}).get("post_mortem", ())
        else:
            settings = self._folder.read_settings()
            run = Run(self._folder, settings, read_so_far(self._folder, settings))
            reports = self._reports()
        title = post_mortem.title(reports, is_running=not self._has_result)
        return {
            "post_mortem_title": title if reports else "",
            "post_mortems": [_post_mortem(one) for one in reports],
            "findings": [[account(one), is_fault(one)] for one in find_in_script(run)],
        }

    def _reports(self) -> Sequence[Mapping[str, Any]]:
        """Written while the script runs."""
        try:
            with open_record(self._folder.path / POST_MORTEM_FILE) as file:
                reports: Sequence[Mapping[str, Any]] = json.load(file)["reports"]
        except FileNotFoundError:
            return ()
        return reports


def _post_mortem(report: Mapping[str, Any]) -> list[str]:
    return [post_mortem.headline(report), *post_mortem.lines(report)]
