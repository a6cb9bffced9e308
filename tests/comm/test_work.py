"""What holds for an operation under way, whatever it is."""

from __future__ import annotations

import pytest

from paceline.comm.work import Work


class Interrupted(Work):
    def _block(self) -> None:
        raise KeyboardInterrupt

    def _poll(self) -> bool:
        return True


def test_what_was_interrupted_does_not_pass_for_complete_when_waited_for_again() -> None:
    work = Interrupted()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            work.wait()
