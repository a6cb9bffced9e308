"""Settings and machine of each run, and the command that repeats it."""

from __future__ import annotations

import shlex

from paceline import formatting
from paceline.analysis.run import Run
from paceline.analysis.run_group import differing, value_text
from paceline.config import RunConfig, non_default_values, to_argv
from paceline.report.document import Block, Code, Details, Table, Text
from paceline.report.sections.outline import SectionContext

TITLE = "Configuration and machine"

NOT_REPEATED = ("out", "name", "node_rank")
"""Settings that say where records go, or who a process is."""


LOOPBACK = RunConfig().master_addr
"""Where torchrun or srun has told workers where to meet, the settings do not."""


def command(config: RunConfig) -> str:
    """What to type for the same run."""
    values = non_default_values(config)
    kept = {name: value for name, value in values.items() if name not in NOT_REPEATED}
    return shlex.join(["paceline", "train", *to_argv(kept)])


def where_to_type(config: RunConfig) -> str:
    """What to know of a command that one machine alone does not carry out; else nothing."""
    if config.nnodes == 1 or config.cluster or config.hosts or config.launcher == "ray":
        return ""
    flags = [] if config.elastic else ["its --node-rank"]
    if config.master_addr == LOOPBACK:
        flags.append("--master-addr of the first")
    told = f", with {' and '.join(flags)}" if flags else ""
    return f" (on each of the {config.nnodes} machines{told})"


def machine(run: Run) -> list[tuple[str, str]]:
    """What a reader needs to judge the figures."""
    if run.result is None:
        return []
    hardware, software = run.result["hardware"], run.result["software"]
    quota = hardware.get("cpu_quota")
    cores = f"{hardware.get('cores', '?')} of {hardware.get('cores_in_machine', '?')} cores"
    gpus = hardware.get("gpus") or []
    names = [str(gpu.get("name", gpu)) if isinstance(gpu, dict) else str(gpu) for gpu in gpus]
    memory = hardware.get("memory_bytes")
    return [
        ("CPU", f"{hardware.get('cpu', '?')}, {cores}" + (f", quota {quota:g}" if quota else "")),
        ("Memory", formatting.size(memory) if isinstance(memory, int | float) else "?"),
        ("GPUs", ", ".join(names) or "none"),
        ("System", f"{hardware.get('kernel', '?')}, {hardware.get('architecture', '?')}"),
        ("Software", ", ".join(f"{name} {text}" for name, text in software.items() if text)),
    ]


def cluster_rows(run: Run) -> list[tuple[str, str, str]]:
    """Of an emulated cluster: what was asked for and what was measured."""
    cluster = (run.result or {}).get("cluster")
    found = cluster.get("got") if isinstance(cluster, dict) else None
    rows = []
    for item in found or ():
        if isinstance(item, dict):
            node = "" if item.get("node") is None else f", node {item['node']}"
            unit = str(item.get("unit", ""))
            asked = item.get("asked")
            rows.append(
                (
                    f"{item.get('what', '?')}{node}",
                    "-" if asked is None else f"{asked:.4g} {unit}",
                    f"{item.get('got', float('nan')):.4g} {unit}",
                )
            )
    return rows


def build(outline: SectionContext) -> list[Block]:
    cells = [cell for cell in outline.cells if cell.runs]
    if not cells:
        return []
    blocks: list[Block] = []
    names = differing([cell.config for cell in cells])
    if names:
        rows = [
            (cell.label, *(value_text(getattr(cell.config, name)) for name in names))
            for cell in cells
        ]
        blocks += [
            Text("Settings that differ:"),
            Table(
                ("configuration", *(name.replace("_", "-") for name in names)),
                rows,
                words=1 + len(names),
            ),
        ]
    blocks += _machines([run for cell in cells for run in cell.runs])
    commands: list[Block] = []
    for cell in cells:
        seeds = sorted({run.config.seed for run in cell.runs})
        told = f" (seeds {', '.join(map(str, seeds))})" if len(seeds) > 1 else ""
        where = where_to_type(cell.config)
        commands += [Text(f"{cell.label}{told}{where}"), Code(command(cell.config))]
    blocks.append(Text("To run a configuration again:"))
    blocks += commands if len(cells) <= 3 else [Details(f"{len(cells):,} commands", commands)]
    overhead = [
        run.result["measurement_overhead"].get("fraction")
        for cell in cells
        for run in cell.runs
        if run.result
    ]
    costs = [value for value in overhead if isinstance(value, float)]
    if costs:
        blocks.append(
            Text(f"Measuring took at most {formatting.share(max(costs))} of a run's time.", "note")
        )
    return blocks


def _machines(runs: list[Run]) -> list[Block]:
    """Each kind of machine once, with the runs that were on it."""
    found: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in runs:
        facts = tuple(machine(run))
        if facts:
            found.setdefault(facts, []).append(run)
    blocks: list[Block] = []
    for facts, own in found.items():
        whose = "All runs" if len(found) == 1 else ", ".join(run.id for run in own[:6]) + (
            f" and {len(own) - 6} more" if len(own) > 6 else ""
        )  # fmt: skip
        blocks.append(Table((f"Machine: {whose}", ""), facts, words=2))
    clusters = {tuple(rows): run for run in runs if (rows := cluster_rows(run))}
    for measured, run in list(clusters.items())[:3]:
        blocks.append(Text(f"The emulated cluster, as measured before {run.id}:"))
        blocks.append(Table(("what", "requested", "measured"), measured))
    return blocks
