"""Traffic counters."""

from __future__ import annotations

import time
from threading import Event, Thread

import pytest

from paceline.measure.timeline import Interval, Moment
from paceline.measure.traffic import Traffic
from paceline.records import TRAFFIC_KINDS
from tests.support.gpu_marks import FakeGpuTimeline


def test_traffic_has_every_kind_of_the_records() -> None:
    assert tuple(Traffic().to_dict()) == TRAFFIC_KINDS


def test_unknown_kind_is_rejected() -> None:
    with pytest.raises(ValueError, match="unknown traffic kind 'gossip'"):
        Traffic().begin("gossip")


def test_restored_counts_continue() -> None:
    traffic, resumed = Traffic(), Traffic()
    traffic.end(traffic.begin("buffers", bytes_sent=5, bytes_received=7, messages=1))
    resumed.restore(traffic.to_dict())
    resumed.end(resumed.begin("buffers", bytes_sent=1))
    before, after = traffic.counts["buffers"], resumed.counts["buffers"]
    assert (after.bytes_sent, after.bytes_received, after.messages) == (6, 7, 1)
    assert after.seconds >= before.seconds > 0


def test_overlapping_transfers_are_timed_once() -> None:
    traffic = Traffic()
    begin = time.perf_counter()
    transfers = [traffic.begin("gradients") for _ in range(3)]
    time.sleep(0.02)
    for transfer in transfers:
        traffic.end(transfer)
    assert 0.02 <= traffic.counts["gradients"].seconds <= time.perf_counter() - begin


def test_counting_is_thread_safe() -> None:
    traffic = Traffic()

    def count() -> None:
        for _ in range(2000):
            traffic.end(traffic.begin("gradients", bytes_sent=3, messages=1))

    threads = [Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    count_of_all = traffic.counts["gradients"]
    assert (count_of_all.bytes_sent, count_of_all.messages) == (24000, 8000)


def test_transfer_on_a_gpu_lasts_from_mark_to_mark() -> None:
    timeline, traffic = FakeGpuTimeline(), Traffic()
    for began, ended in ((1.0, 3.0), (2.0, 6.0)):
        timeline.now = began
        transfer = traffic.begin("gradients", Interval.begin(timeline), bytes_sent=5, messages=1)
        timeline.now = ended
        traffic.end(transfer)
    assert traffic.to_dict()["gradients"] == {
        "bytes_sent": 10,
        "bytes_received": 0,
        "messages": 2,
        "seconds": 5.0,
    }


def test_settle_waits_for_a_thread_that_is_settling() -> None:
    class BusyGpu(FakeGpuTimeline):
        def __init__(self) -> None:
            super().__init__()
            self.is_asked, self.is_done = Event(), Event()

        def seconds(self, moment: Moment) -> float:
            self.is_asked.set()
            self.is_done.wait()
            return super().seconds(moment)

    timeline, traffic = BusyGpu(), Traffic()
    transfer = traffic.begin("gradients", Interval.begin(timeline))
    timeline.now = 3.0
    traffic.end(transfer)
    threads = [Thread(target=traffic.settle) for _ in range(2)]
    threads[0].start()
    timeline.is_asked.wait()
    threads[1].start()
    threads[1].join(0.1)
    assert threads[1].is_alive(), "the seconds of the transfer are not known yet"
    timeline.is_done.set()
    for thread in threads:
        thread.join()
    assert traffic.counts["gradients"].seconds == 3.0


def test_captured_transfer_is_counted_by_each_replay() -> None:
    timeline, traffic = FakeGpuTimeline(), Traffic()
    with traffic.capture() as captured:
        traffic.end(traffic.begin("gradients", Interval.begin(timeline), bytes_sent=5))
    assert traffic.to_dict()["gradients"]["bytes_sent"] == 0
    traffic.log = []
    for moments in ([1.0, 2.0], [10.0, 12.0], [20.0, 24.0]):
        traffic.before_replay(captured)
        timeline.replay(timeline.marks, moments)
        traffic.replayed(captured)
    total = traffic.to_dict()["gradients"]
    assert (total["bytes_sent"], total["seconds"]) == (15, 1 + 2 + 4)
    assert [(each.began, each.completed) for each in traffic.log] == [
        (1.0, 2.0),
        (10.0, 12.0),
        (20.0, 24.0),
    ]
