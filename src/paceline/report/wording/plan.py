"""Sentences and table cells of plans, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline import formatting
from paceline.analysis.contention import MIN_CONTENTION_SHARE
from paceline.measure.noise_scale import FEWEST_SAMPLES
from paceline.plan.advice import Advice
from paceline.plan.calibration import MeasuredRun
from paceline.plan.next_runs import NextRun
from paceline.plan.plan import Plan
from paceline.plan.prediction import Interval, Prediction
from paceline.plan.sensitivity import Effect
from paceline.plan.step_simulation import BUCKET_STRATEGIES
from paceline.plan.target import Target
from paceline.plan.validation import Check, median_error
from paceline.records import noise_scale_text
from paceline.strategies.bucket_layout import FIRST_MIB, MIB


def step_text(interval: Interval, mark: str = "") -> str:
    """Such as "343 ms (320 to 370)", with a mark after the median."""
    median = formatting.short_seconds(interval.median)
    _, _, unit = median.rpartition(" ")
    low, high = (
        formatting.short_seconds(each, unit).removesuffix(f" {unit}")
        for each in (interval.low, interval.high)
    )
    return f"{median}{mark} ({low} to {high})"


def change_text(interval: Interval) -> str:
    """Such as "-18% (-24 to -13)"."""
    median, low, high = (
        f"{percent:+d}" if (percent := round(100 * each)) else "0"
        for each in (interval.median, interval.low, interval.high)
    )
    return f"{median}% ({low} to {high})"


def effect_cells(effect: Effect) -> tuple[str, str, str]:
    """The change, and what it does to the step time and to the throughput."""
    star = "*" if effect.is_extrapolated else ""
    return effect.change + star, change_text(effect.step_seconds), change_text(effect.throughput)


def configuration(target: Target) -> str:
    options = "".join(f", {key}={value}" for key, value in target.options.items())
    workers = "1 worker" if target.workers == 1 else f"{target.workers:,} workers"
    return f"{target.strategy}{options}, {workers}, batch {target.samples:,}"


def next_run_text(one: NextRun, fastest: MeasuredRun) -> str:
    """A step to try, with its gain over the fastest measured run."""
    workers = "1 worker" if fastest.workers == 1 else f"{fastest.workers:,} workers"
    low, high = (f"{100 * value:+.0f}%" for value in (one.gain.low, one.gain.high))
    extrapolated = ", extrapolated" if one.prediction.extrapolated else ""
    return (
        f"Try {configuration(one.prediction.target)}: a plan from these runs predicts"
        f" {100 * one.gain.median:+.0f}% samples/s ({low} to {high}, 80% interval{extrapolated})"
        f" relative to {fastest.strategy} with {workers}: `{one.command}`"
    )


def by_place(predictions: Sequence[Prediction]) -> dict[str, list[Prediction]]:
    """Predictions by what connects their workers, each for a table and its curves.

    Either all have the same hosts, or hosts have the same number of workers: one host with that
    many, or fewer, belongs to the next larger number of hosts.
    """
    spread = {each.target.hosts for each in predictions if each.target.host_count > 1}
    is_host_shared = any(
        each.target.host_count == 1 and each.target.workers > 1 for each in predictions
    )
    is_by_workers = len(spread) > 1 or is_host_shared
    found: dict[str, list[Prediction]] = {}
    of_one_host: list[Prediction] = []
    for each in predictions:
        target = each.target
        if target.host_count == 1 and target.link is None and spread:
            of_one_host.append(each)
            continue
        place = place_text(target)
        if is_by_workers and target.host_count > 1:
            per_host = target.workers // target.host_count
            workers = "1 worker" if per_host == 1 else f"{per_host} workers"
            place = ", ".join([f"{workers} per host", *_between_hosts(target)])
        found.setdefault(place, []).extend([*of_one_host, each])
        of_one_host = []
    if of_one_host:
        found.setdefault(place_text(of_one_host[0].target), []).extend(of_one_host)
    return found


def place_text(target: Target) -> str:
    if target.host_count == 1 and target.link is None:
        return "one host"
    hosts = [f"{target.hosts} hosts"] if target.hosts is not None else []
    return ", ".join([*hosts, *_between_hosts(target)])


def _between_hosts(target: Target) -> Iterator[str]:
    if target.link is not None:
        yield f"link {target.link}"
    if target.racks is not None:
        ratio = f"{target.racks.oversubscription:g}:1"
        yield f"racks of {target.racks.size}, oversubscribed {ratio}"


def batch_text(target: Target) -> str:
    if target.scaling == "weak":
        return f"batch {target.samples // target.workers:,} per worker"
    return f"batch {target.samples:,}"


def recommendation_text(advice: Advice) -> str:
    best, price = advice.best, advice.price_per_worker_hour
    place = f", {place_text(best.target)}" if best.target.workers > 1 else ""
    text = f"{configuration(best.target)}{place}: {step_text(best.step_seconds)} per step"
    text += f", {formatting.count(best.throughput.median)} samples/s"
    if price is not None:
        cost = best.target.workers * price / 3600 / best.throughput.median
        text += f", {1e6 * cost:.3g} per million samples"
    return text + (", extrapolated" if best.extrapolated else "")


def limit_text(advice: Advice) -> str:
    exposed = formatting.percent(100 * advice.best.exposed_communication.median)
    return f"Limited by {advice.limit}: {exposed} of a step is exposed communication."


def runner_up_texts(advice: Advice) -> list[str]:
    what = "time" if advice.price_per_worker_hour is None else "money"
    # The default options are recommended if others are less than MIN_GAIN better.
    texts = []
    for other, more in advice.runners_up:
        amount = "as much"
        if abs(more) >= 0.005:
            amount = f"{abs(more):.0%} {'more' if more > 0 else 'less'}"
        texts.append(f"{amount} {what}: {configuration(other.target)}")
    if advice.codec is not None:
        encoded, saving = advice.codec
        texts.append(
            f"{saving:.0%} less {what}: {configuration(encoded.target)}, which changes the"
            " gradients: compare the accuracy"
        )
    return texts


def batch_advice_texts(advice: Advice) -> Iterator[str]:
    """What the batch size is chosen by, how sure that is, and how to check it."""
    batch = advice.batch
    if batch is None:
        return
    learning, relative = batch.learning, batch.relative_time
    if batch.steps is not None and batch.seconds is not None:
        loss = "the loss" if learning.loss is None else f"the test loss of {learning.loss:.4g}"
        run = f"run {Path(learning.source).name}" if learning.source else "the run"
        text = f"Batch {batch.batch_size:,} reaches {loss} of {run} in"
        text += f" {batch.steps:,.0f} steps, {step_text(batch.seconds)}"
        if advice.price_per_worker_hour is not None:
            hours = batch.seconds.median / 3600 * advice.best.target.workers
            text += f", at a cost of {hours * advice.price_per_worker_hour:,.3g}"
        if relative is not None and batch.batch_size != learning.batch_size:
            text += f": {relative.median:.2g} times ({relative.low:.2g} to {relative.high:.2g}) the"
            text += f" time with batch {learning.batch_size:,}"
        yield f"{text}."
    low, high = batch.batch_range
    scale = noise_scale_text(
        {**learning.to_dict(), "value": learning.noise_scale, "batch": learning.batch_size}
    )
    best = f"{low:,} to {high:,}" if high > low else f"{low:,}"
    yield f"Noise scale N: {scale}. By the ends of that interval, the best batch is {best}."
    rate = "" if learning.learning_rate is None else f"{learning.learning_rate:.3g} x "
    yield f"Learning rate at other batch sizes: {rate}{learning.rate_rule}."
    yield (
        "The noise scale rests on assumptions (arXiv 2505.23971). Before a long run, check the"
        " batch size in short runs from a checkpoint: run_branches in docs/metrics.md."
    )


def validation_texts(checks: Sequence[Check]) -> list[str]:
    """How far predictions of measured runs are off."""
    own = [check for check in checks if not check.is_held_out]
    held_out = [check for check in checks if check.is_held_out]
    sentences = []
    for some, what in (
        (own, "measured {} of this plan, predicted without runs of the same configuration"),
        (held_out, "held-out {}"),
    ):
        if some:
            runs = what.format("run" if len(some) == 1 else "runs")
            inside = sum(check.is_in_interval for check in some)
            sentences.append(
                f"{len(some)} {runs}: median error {formatting.percent(100 * median_error(some))},"
                f" {inside} of {len(some)} inside the 80% interval."
            )
    return sentences


def extrapolation_notes(predictions: Sequence[Prediction]) -> list[str]:
    """Reasons that differ in their first number only are one note, with all numbers."""
    numbers: dict[str, list[int]] = {}
    for reason in dict.fromkeys(reason for each in predictions for reason in each.extrapolated):
        first, _, rest = reason.partition(" ")
        own = numbers.setdefault(rest if first.isdecimal() else reason, [])
        own.extend([int(first)] if first.isdecimal() else [])
    return [
        f"* extrapolated: {', '.join(map(str, sorted(own)))}{' ' if own else ''}{rest}"
        for rest, own in numbers.items()
    ]


def disturbance_notes(plan: Plan) -> Iterator[str]:
    """Runs that other processes slowed, so that predictions are off, or seem to be."""
    for share, runs in (
        (plan.calibration.other_processes_share, "runs"),
        (plan.held_out_other_processes_share, "held-out runs"),
    ):
        if share is not None and share >= MIN_CONTENTION_SHARE:
            yield (
                f"Other processes used up to {formatting.share(share)} of the CPU during the"
                f" {runs}: measure again on an idle machine."
            )


def condition_notes(plan: Plan) -> Iterator[str]:
    """What was not measured, or not well."""
    yield from plan.skipped
    advice, is_script = plan.advice, plan.calibration.script is not None
    is_batch_fixed = advice is None or advice.best.target.scaling == "weak" or is_script
    if advice is not None and advice.batch is None and not is_batch_fixed:
        yield (
            "Batch sizes were not compared: no run shows the gradient noise scale with an interval,"
            f" which takes at least {FEWEST_SAMPLES} measured steps (--noise-every)."
        )
    if not plan.calibration.has_tensor_sizes:
        yield (
            "Sizes of tensors are not in profiles: buckets of DistributedDataParallel stand for"
            " them. A run of the script with paceline.join has them."
        )
    if not plan.calibration.has_ready_times and any(
        each.target.strategy in BUCKET_STRATEGIES and not _is_one_bucket(plan, each.target)
        for each in plan.predictions
    ):
        yield (
            "When gradients are ready was not measured: assumed to be at equal distances. A run of"
            " overlap with two workers and -o bucket_mib=measured measures it."
        )


def _is_one_bucket(plan: Plan, target: Target) -> bool:
    """Whether no bucket starts before the last gradient is ready, so that no other time counts."""
    total_bytes = sum(each.size_bytes for each in plan.calibration.gradients)
    has_own_sizes = bool({"bucket_mib", "first_bucket_mib"} & target.options.keys())
    return total_bytes < FIRST_MIB * MIB and not has_own_sizes
