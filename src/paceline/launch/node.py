"""Several workers on this machine, and perhaps others on more machines, each started by its own.

The launcher of each node starts the node's workers (launch/processes.py), watches over them and
ends all of them when one fails; launch/nodes.py brings it together with the launchers of the other
nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from paceline.config import RunConfig
from paceline.errors import PacelineError, RunError, UsageError
from paceline.launch.nodes import NodeCoordinator
from paceline.launch.processes import NodeWorkers
from paceline.launch.result import RunOutcome, write_result
from paceline.launch.signals import SignalMonitor
from paceline.launch.termination import Termination
from paceline.records import RunFolder
from paceline.training.rank_report import RankReport


def run(config: RunConfig, resumed: RunFolder | None, quiet: bool) -> RunOutcome:
    """Start this node's workers, watch over them, and on the first node write the result."""
    with ExitStack() as held:
        folder = resumed
        if folder is None and config.node_rank == 0:
            folder = RunFolder.create(config)
        with SignalMonitor() as interruptions:
            try:
                nodes = NodeCoordinator(config)
                folder = _agree_on_folder(nodes, folder, held)
            except PacelineError:
                if folder is not None and resumed is None:
                    folder.discard()
                raise
            interruptions.raise_on_signal = False
            crew = NodeWorkers(
                config, folder, nodes.port, resumed is not None, quiet, board=nodes.board
            )
            with _started(crew, nodes, is_new=resumed is None):
                ending = crew.watch(nodes, interruptions)
            # The records are complete only now, with the last sample of the resources.
            ending = nodes.exchange_terminations(ending, folder, crew.records())
        return _conclude(config, crew, ending, nodes.shares_folder, is_new=resumed is None)


def _agree_on_folder(
    nodes: NodeCoordinator, folder: RunFolder | None, held: ExitStack
) -> RunFolder:
    """The first node locks it, for as long as `held` is open."""
    try:
        if folder is not None and nodes.is_first:
            held.enter_context(folder.locked())
        return nodes.agree_on_folder(folder)
    except PacelineError as error:
        nodes.refuse(Termination(str(error), error.exit_code))
        raise


@contextmanager
def _started(crew: NodeWorkers, nodes: NodeCoordinator, is_new: bool) -> Iterator[None]:
    """With the workers running; where they cannot be started, other nodes learn why."""
    try:
        crew.__enter__()
    except PacelineError as error:
        nodes.refuse(Termination(str(error), error.exit_code))
        if is_new:
            crew.discard_records()
        raise
    try:
        yield
    finally:
        crew.__exit__()


def is_refusal(ending: Termination, reports: list[RankReport], is_new: bool) -> bool:
    """Whether nobody had begun to train; a strategy may refuse only when it sees the model."""
    if reports and is_new and ending.exit_code == UsageError.exit_code:
        return not any(report.iterations for report in reports)
    return not reports and ending.exit_code != RunError.exit_code


def _conclude(
    config: RunConfig,
    crew: NodeWorkers,
    ending: Termination | None,
    shares_folder: bool,
    is_new: bool,
) -> RunOutcome:
    is_first = config.node_rank == 0
    reports = crew.reports()
    crew.clear_traces(reports=is_first or not shares_folder)
    if ending and is_refusal(ending, reports, is_new):
        # Nobody trained: a refused run leaves no trace, and its name stays free.
        if is_new:
            crew.discard_records()
        raise ending.error()
    if not is_first:
        if ending:
            raise ending.error()
        return RunOutcome(crew.folder, None, 0)
    if crew.trouble and reports:
        reports[0].warnings.append(crew.trouble)
    result = write_result(config, crew.folder, reports, ending)
    return RunOutcome(crew.folder, result, ending.exit_code if ending else 0)
