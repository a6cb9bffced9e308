"""How long the training thread slept."""

from __future__ import annotations

import time
from threading import Thread

from paceline.profiler.sleep_time import SleepTime


def test_a_thread_sleeps_unless_it_computes() -> None:
    sleep_time = SleepTime()
    time.sleep(0.05)
    assert sleep_time.take(0.02) == 0.02
    began = time.perf_counter()
    # It is known once.
    assert 0.02 < sleep_time.take(10.0) < 10.0
    computed = time.thread_time()
    while time.thread_time() - computed < 0.05:
        pass
    slept = sleep_time.take(10.0)
    assert slept <= time.perf_counter() - began - 0.05 + 0.01


def test_another_thread_does_not_know_how_long_it_slept() -> None:
    sleep_time = SleepTime()
    time.sleep(0.01)
    taken: list[float] = []
    thread = Thread(target=lambda: taken.append(sleep_time.take(1.0)))
    thread.start()
    thread.join()
    assert taken == [0.0]
