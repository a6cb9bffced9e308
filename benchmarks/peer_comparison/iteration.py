"""Update time of every contender."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from peer_comparison.group import CONTENDERS, TITLES, Fleet
from peer_comparison.messages import Prepare, Prepared, Train
from peer_comparison.rounds import (
    Blocks,
    Length,
    Spread,
    milliseconds,
    progress,
    quartiles,
    ratio_text,
    speed_ups,
    take_turns,
    verdict,
)

REFERENCE = "ddp"
OURS = ("shared", "overlap")
LIMIT = "apart"
"""Workers that train independently: the time without any communication."""
GOALS = {
    ("lenet", 2): 1.4,
    ("lenet", 4): 1.8,
    ("mlp", 2): 1.8,
    ("mlp", 4): 2.0,
    ("resnet18", 2): 1.0,
    ("resnet18", 4): 1.0,
    ("vgg11", 2): 1.0,
    ("vgg11", 4): 1.0,
}
"""Required speedup of `shared` over DDP, by model and world size."""
SAME_TRAINING = 1e-3
"""Allowed deviation of a loss, as a fraction of its decrease: rounding only."""


@dataclass(frozen=True)
class Task:
    model: str
    batch_per_worker: int
    learning_rate: float
    """High enough for the loss to fall visibly."""
    checked_updates: int
    """Losses are compared after this many updates."""

    def request(self, workers_in_one: int = 1) -> Prepare:
        """For one process that does the work of several workers."""
        batch = self.batch_per_worker * workers_in_one
        return Prepare(self.model, batch, self.learning_rate, self.checked_updates)


TASKS = {
    "lenet": Task("lenet", 16, 0.1, 10),
    "mlp": Task("mlp", 32, 0.1, 10),
    "resnet18": Task("resnet18", 8, 0.01, 4),
    "vgg11": Task("vgg11", 32, 0.01, 4),
}


@dataclass(frozen=True)
class Row:
    contender: str
    seconds: Spread
    """Seconds per update."""
    speed_up: Spread | None
    """Speedup over DDP; None for DDP itself."""
    goal: float | None
    first_loss: float
    last_loss: float
    loss_off_by: float
    """Difference from DDP's loss, as a fraction of the decrease of DDP's loss."""


def compare_iterations(fleet: Fleet, task: Task, length: Length) -> dict[str, Any]:
    """Measure a model, print its table and return it."""
    what = f"{task.model}, {fleet.world_size} workers, batch of {task.batch_per_worker} each"
    prepared = prepare(fleet, fleet.starting((*CONTENDERS, LIMIT)), task, what)
    blocks = measure(fleet, prepared, length, what)
    goal = GOALS.get((task.model, fleet.world_size))
    rows = [row(name, blocks, prepared, goal) for name in TITLES if name in blocks]
    show(what, task, rows)
    return {**asdict(task), "workers": fleet.world_size, "rows": [asdict(each) for each in rows]}


def prepare(fleet: Fleet, names: list[str], task: Task, what: str) -> dict[str, Prepared]:
    with progress(f"{what}: first updates"):
        answers = {
            name: fleet.attempt(name, lambda group: group.prepared(task.request()))
            for name in names
        }
    return {name: answer for name, answer in answers.items() if answer is not None}


def measure(fleet: Fleet, prepared: dict[str, Prepared], length: Length, what: str) -> Blocks:
    """Blocks of about equal time; each starts with one untimed update."""
    updates = {name: length.count(each.update_seconds) for name, each in prepared.items()}
    repeats = length.repeats(
        sum((updates[name] + 1) * each.update_seconds for name, each in prepared.items())
    )

    def run(name: str) -> float | None:
        return fleet.attempt(name, lambda group: group.seconds(Train(updates[name])))

    with progress(f"{what}: {repeats} rounds of {len(prepared)} contenders"):
        return take_turns(list(prepared), repeats, run)


def row(name: str, blocks: Blocks, prepared: dict[str, Prepared], goal: float | None) -> Row:
    speed_up, off_by = None, 0.0
    if name != REFERENCE and REFERENCE in blocks:
        reference = prepared[REFERENCE]
        fall = abs(reference.first_loss - reference.last_loss)
        off_by = abs(prepared[name].last_loss - reference.last_loss) / fall
        speed_up = Spread.of(speed_ups(blocks[name], blocks[REFERENCE]))
    return Row(
        contender=name,
        seconds=Spread.of_blocks(blocks[name]),
        speed_up=speed_up,
        goal=goal if name == "shared" else None,
        first_loss=prepared[name].first_loss,
        last_loss=prepared[name].last_loss,
        loss_off_by=off_by,
    )


def show(what: str, task: Task, rows: list[Row]) -> None:
    print(f"\n{what}")
    print(f"{'':17}{'ms per update':^22}{'speedup over DDP':^20}{'':12}{'loss':>8}")
    print(
        f"{'':17}{'median':>8}{'quartiles':>14}{'median':>8}{'quartiles':>12}{'goal':>12}{'off':>8}"
    )
    for each in rows:
        print(
            f"{TITLES[each.contender]:17}{milliseconds(each.seconds.median):>8}"
            f"{quartiles(each.seconds):>14}" + compared(each)
        )
    for each in rows:
        if each.contender == REFERENCE:
            print(
                f"DDP's loss fell from {each.first_loss:.6f} to {each.last_loss:.6f} "
                f"in {task.checked_updates} updates"
            )
    strangers = [
        TITLES[each.contender]
        for each in rows
        if each.contender != LIMIT and not each.loss_off_by <= SAME_TRAINING
    ]
    if strangers:
        print(f"NOT THE SAME TRAINING, so not to be compared: {', '.join(strangers)}")
    show_fastest(rows)


def compared(each: Row) -> str:
    if each.speed_up is None:
        return ""
    return (
        f"{ratio_text(each.speed_up.median):>8}{quartiles(each.speed_up, ratio_text):>12}"
        f"{verdict(each.speed_up.median, each.goal):>12}"
        f"{'other' if each.contender == LIMIT else loss_text(each.loss_off_by):>8}"
    )


def loss_text(part: float) -> str:
    return "0" if part == 0 else f"{part:.0e}"


def show_fastest(rows: list[Row]) -> None:
    medians = {each.contender: each.seconds.median for each in rows}
    peers = [name for name in medians if name not in (*OURS, LIMIT)]
    if "shared" not in medians or not peers:
        return
    best = min(peers, key=medians.__getitem__)
    ratio = medians[best] / medians["shared"]
    print(
        f"fastest of {len(peers)} peers: {TITLES[best]}, `shared` {ratio:.2f} times as fast: "
        + ("goal met" if ratio > 1 else "goal missed")
    )
