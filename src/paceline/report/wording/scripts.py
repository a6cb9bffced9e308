"""The sentences about a profiled script: what slows it down, and what to change where."""

from __future__ import annotations

from collections.abc import Sequence

from paceline import formatting
from paceline.analysis.script import findings as found
from paceline.analysis.script.findings import ScriptFinding
from paceline.analysis.script.profile import Line
from paceline.analysis.script.slow_rank import SlowRank, WaitsForCore
from paceline.report.wording.bottlenecks import shares_text

SUBJECTS: dict[type, str] = {
    SlowRank: "Straggler",
    WaitsForCore: "CPU-starved rank",
    found.NoLoaderWorkers: "DataLoader without workers",
    found.SlowInput: "Slow input",
    found.BlockingCall: "Blocking call",
    found.BlockingCopy: "Blocking copy",
    found.TooManyThreads: "Too many threads",
    found.SmallBuckets: "Small buckets",
    found.NeedlessSearch: "find_unused_parameters",
    found.Imbalance: "Imbalance",
    found.CheckpointStalls: "Checkpoints",
    found.GrowingMemory: "Growing memory",
}
SEARCH_OPTIONS = {
    "accelerate": (
        "DistributedDataParallelKwargs(find_unused_parameters=False), or"
        " TrainingArguments(ddp_find_unused_parameters=False) for a Trainer of Transformers"
    ),
    "transformers": "TrainingArguments(ddp_find_unused_parameters=False)",
    "lightning": "DDPStrategy(find_unused_parameters=False)",
    "pytorch_lightning": "DDPStrategy(find_unused_parameters=False)",
}
"""Options of libraries that construct DDP, by which it does not search for unused parameters."""
CODE_MAX = 48
"""Characters of a line of the script."""


def subject(one: ScriptFinding) -> str:
    if isinstance(one, found.StepBound):
        return one.bottleneck.kind.capitalize()
    return SUBJECTS[type(one)]


def sentence(one: ScriptFinding) -> str:
    """What was measured."""
    match one:
        case SlowRank() | WaitsForCore() | found.Imbalance():
            return _unequal_ranks(one)
        case found.NoLoaderWorkers() | found.SlowInput():
            return _slow_input(one)
        case found.BlockingCall() | found.BlockingCopy():
            return _blocking(one)
        case found.SmallBuckets() | found.NeedlessSearch():
            return _inefficient_exchange(one)
        case found.TooManyThreads():
            return (
                f"{one.ranks} ranks with {one.threads} threads each{_on(one.host)} share"
                f" {one.cores} cores: threads wait for a core for {formatting.share(one.share)} of"
                " the CPU time that they need."
            )
        case found.CheckpointStalls():
            return (
                f"{one.count} checkpoints block training for {formatting.seconds(one.seconds)}"
                f" each, {formatting.share(one.share)} of the time{_at(one.line)}."
            )
        case found.GrowingMemory():
            return (
                f"{'GPU memory' if one.is_gpu else 'memory'} of rank {one.rank} grew from"
                f" {formatting.size(one.begin_bytes)} to {formatting.size(one.end_bytes)} in the"
                f" second half of the run, by {formatting.size(one.bytes_per_step)} per step."
            )
        case found.StepBound():
            return f"{shares_text(one.bottleneck)}."


def _unequal_ranks(one: SlowRank | WaitsForCore | found.Imbalance) -> str:
    share = formatting.share(one.share)
    match one:
        case SlowRank():
            ratio = f"{one.seconds / one.others_seconds:.2f}" if one.others_seconds else "many"
            since = "from the beginning" if one.since is None else f"since step {one.since:,}"
            return (
                f"rank {one.rank}{_on(one.host)} takes {formatting.seconds(one.seconds)} per step,"
                f" without communication and time without a core, {ratio} times as long as the"
                f" others ({formatting.seconds(one.others_seconds)}), mostly in {one.phase},"
                f" {since}; the others wait {share} of each step for it."
            )
        case WaitsForCore():
            return (
                f"rank {one.rank}{_on(one.host)} waits {formatting.seconds(one.queue_seconds)} per"
                f" step for a core, and the others wait {share} of each step for it."
            )
        case found.Imbalance():
            return (
                f"ranks wait {formatting.seconds(one.seconds)} per step for one another, {share} of"
                " the step time, but none of them is always the slowest."
            )


def _slow_input(one: found.NoLoaderWorkers | found.SlowInput) -> str:
    seconds, share = formatting.seconds(one.seconds), formatting.share(one.share)
    match one:
        case found.NoLoaderWorkers():
            return (
                f"each training process makes its batches itself, which takes {seconds}, {share} of"
                f" each step{_at(one.line)}."
            )
        case found.SlowInput():
            return (
                f"steps wait {seconds} for a batch, {share} of the step time, with"
                f" num_workers={one.workers}{_at(one.line)}."
            )


def _blocking(one: found.BlockingCall | found.BlockingCopy) -> str:
    seconds, share = formatting.seconds(one.seconds), formatting.share(one.share)
    if isinstance(one, found.BlockingCopy):
        source = "from pageable memory" if one.is_pageable else "without non_blocking=True"
        return (
            f"copies to the GPU {source} block every step for {seconds}, {share} of the step time,"
            f" for {formatting.size(one.bytes)}{_at(one.line)}."
        )
    times = "" if round(one.per_step, 1) == 1 else f" {one.per_step:.1f} times"
    if one.is_costly:
        return (
            f"`{one.call}` is called{times} in every step and blocks it for {seconds}, {share} of"
            f" the step time{_at(one.line)}."
        )
    return (
        f"`{one.call}` is called{times} in every step{_at(one.line)}. It takes {seconds} here, but"
        " on a GPU it waits for all queued work."
    )


def _inefficient_exchange(one: found.SmallBuckets | found.NeedlessSearch) -> str:
    share = formatting.share(one.share)
    match one:
        case found.SmallBuckets():
            made_in = one.line.made_in if one.line else None
            caller = made_in.library if made_in else "the script"
            what = "DDP exchanges" if one.is_ddp else f"{caller} all-reduces"
            return (
                f"{what} gradients in {one.per_step:.0f} parts of"
                f" {formatting.size(one.mean_bytes)} per step; exposed communication is {share} of"
                f" the step time{_at(one.line)}."
            )
        case found.NeedlessSearch():
            return (
                f"DDP searches for unused parameters after every forward pass and finds none:"
                f" {formatting.seconds(one.seconds)}, {share} of each step{_at(one.line)}."
            )


def contention(core_waits: Sequence[float | None]) -> str:
    """What contention does to the figures of scripts, and what findings make of it."""
    known = [share for share in core_waits if share is not None]
    most = f" (up to {formatting.share(max(known))} of the training time)" if known else ""
    return (
        f"Step times and phases include the time in which a rank was ready to run but had no core"
        f"{most}. No bottleneck and no imbalance is named, nor a straggler or slow input that may"
        " be due to this time."
    )


def account(one: ScriptFinding) -> str:
    """All about a finding, with its line once."""
    text = f"{subject(one)}: {sentence(one)}"
    change = remedy(one)
    line = getattr(one, "line", None)
    if line is not None and line.text in text:
        change = change.replace(_in(line), "")
    return f"{text} {change}".strip()


def remedy(one: ScriptFinding) -> str:
    """What to change; empty where nothing follows from the finding."""
    line = getattr(one, "line", None)
    if line is not None and line.made_in is not None:
        change = _for_library(one, line.made_in.library)
        if change:
            return f"{change}{_in(line)}."
    match one:
        case SlowRank():
            return _for_slow_rank(one)
        case WaitsForCore():
            return f"End other processes{_on(one.host)}, or use fewer ranks or threads there."
        case found.NoLoaderWorkers() | found.SlowInput():
            return _for_input(one)
        case found.BlockingCall() | found.BlockingCopy():
            return _for_blocking(one)
        case found.TooManyThreads():
            return _fewer_threads(one)
        case found.SmallBuckets(is_ddp=True):
            return f"Use larger buckets: bucket_cap_mb is 25 by default{_in(one.line)}."
        case found.SmallBuckets():
            return (
                "All-reduce one flat tensor instead of many small ones, or use"
                f" DistributedDataParallel{_in(one.line)}."
            )
        case found.NeedlessSearch():
            return f"Remove find_unused_parameters=True{_in(one.line)}."
        case found.Imbalance():
            return "Give all ranks batches of equal cost, such as sequences of similar length."
        case found.CheckpointStalls():
            return (
                "Save less often, or in the background with"
                f" `torch.distributed.checkpoint.async_save`{_in(one.line)}."
            )
        case found.GrowingMemory():
            return (
                "Look for tensors that are kept from step to step: a list of losses keeps their"
                " graphs, unless each is detached."
            )
        case found.StepBound():
            return _for_bottleneck(one)


def _for_library(one: ScriptFinding, library: str) -> str:
    """What to change if a library makes the call; empty if that is the same as in a script."""
    maker = f"by {library}, not by the script"
    match one:
        case found.BlockingCall():
            return (
                f"The call is made {maker}: look for an option of {library} to make it less often,"
                " such as its logging interval"
            )
        case found.BlockingCopy():
            change = "Set pin_memory=True of the DataLoader. " if one.is_pageable else ""
            return f"{change}The copy is made {maker}: look for its option for non_blocking=True"
        case found.SmallBuckets(is_ddp=True):
            return (
                f"DDP is constructed {maker}: look for its option for bucket_cap_mb, which is 25 by"
                " default"
            )
        case found.SmallBuckets():
            return f"The all-reduces are made {maker}: look for its option for larger buckets"
        case found.NeedlessSearch():
            option = SEARCH_OPTIONS.get(library, "its option for find_unused_parameters=False")
            return f"DDP is constructed {maker}: use {option}"
        case found.CheckpointStalls():
            return f"Save less often: checkpoints are written {maker}"
        case _:
            return ""


def _for_slow_rank(one: SlowRank) -> str:
    match one:
        case SlowRank(phase="input", has_neighbors=True):
            return (
                f"Compare the data of rank {one.rank} with that of the others: its batches take"
                f" longer{_in(one.line)}."
            )
        case SlowRank(phase="input"):
            return (
                f"Compare the storage and the data of rank {one.rank} with those of the others:"
                f" its batches take longer{_in(one.line)}."
            )
        case SlowRank(phase="other"):
            return (
                f"Look for code that only rank {one.rank} runs between its steps, such as logging."
            )
        case SlowRank(has_neighbors=True):
            return (
                f"Other ranks on the same machine are faster: compare what rank {one.rank} computes"
                " with them (batch sizes, code that depends on the rank, its cores or GPU)."
            )
        case SlowRank():
            return (
                f"Compare the machine of rank {one.rank} with the others (clock, temperature, other"
                " processes), or give that rank smaller batches."
            )


def _for_input(one: found.NoLoaderWorkers | found.SlowInput) -> str:
    match one:
        case found.NoLoaderWorkers():
            cores = (
                ""
                if one.spare_cores
                else " All cores are in use: this helps as far as the input waits for storage."
            )
            return (
                "Set num_workers of the DataLoader, so that batches are made while the model"
                f" computes{_in(one.line)}.{cores}"
            )
        case found.SlowInput(spare_cores=0):
            return (
                f"Make batches cheaper to load{_in(one.line)}. All cores are in use: more workers"
                " help only if they wait for storage."
            )
        case found.SlowInput():
            return (
                f"Use more than num_workers={one.workers}, or make batches cheaper to"
                f" load{_in(one.line)}."
            )


def _for_blocking(one: found.BlockingCall | found.BlockingCopy) -> str:
    match one:
        case found.BlockingCall() if one.call.startswith("dist."):
            return (
                f"Call `{one.call}` every 50 steps, or with async_op=True and wait a step"
                f" later{_in(one.line)}."
            )
        case found.BlockingCall():
            return (
                "Read values back every 50 steps: add them up in a tensor with"
                f" `detach()` until then{_in(one.line)}."
            )
        case found.BlockingCopy(is_pageable=True):
            return (
                "Set pin_memory=True of the DataLoader and copy with non_blocking=True: the copy"
                f" then runs while the program goes on{_in(one.line)}."
            )
        case found.BlockingCopy():
            return f"Copy with non_blocking=True: the batch is in pinned memory{_in(one.line)}."


def _for_bottleneck(one: found.StepBound) -> str:
    match one:
        case found.StepBound() if one.bottleneck.main_share == "communication":
            return (
                "Communicate less: larger batches, gradient accumulation with `no_sync()`, or a"
                " communication hook of DDP such as bf16_compress_hook."
            )
        case found.StepBound() if one.bottleneck.main_share == "other":
            return (
                "Look for what the loop does besides the model, the optimizer and DataLoaders, such"
                " as making batches itself, logging or moving data."
            )
        case found.StepBound():
            return ""


def _fewer_threads(one: found.TooManyThreads) -> str:
    fitting = one.cores // one.ranks
    if not fitting:
        return f"Start at most {one.cores} ranks{_on(one.host)}."
    how = "Set" if one.is_default else "Change"
    return (
        f"{how} OMP_NUM_THREADS={fitting}, or call torch.set_num_threads({fitting}): each of"
        f" {one.ranks} ranks gets its share of the {one.cores} cores."
    )


def _on(host: str) -> str:
    return f" on {host}" if host else ""


def _at(line: Line | None) -> str:
    """The place of a finding with its code."""
    if line is None:
        return ""
    code = line.code if len(line.code) <= CODE_MAX else f"{line.code[: CODE_MAX - 1]}…"
    return f" ({line.text}: `{code}`)" if code else f" ({line.text})"


def _in(line: Line | None) -> str:
    return f" ({line.text})" if line else ""
