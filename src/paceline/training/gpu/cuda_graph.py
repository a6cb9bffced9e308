"""CUDA graphs: a function is captured once, and its GPU work is then repeated by a single launch.

Launching the kernels of a training step one by one takes Python longer than the GPU needs to run
them. A graph contains them all. It repeats exactly the captured work: its Python code does not run
again, so everything that changes from call to call must be in tensors.

The first calls run eagerly (warm-up), so that libraries initialize and the optimizer creates its
state. They are real steps of the training, and captured steps give the same bits.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from paceline.comm.objects import first_value
from paceline.config import RunConfig
from paceline.data.pipeline import InputPipeline
from paceline.data.resident import ResidentPipeline
from paceline.errors import error_line
from paceline.strategies.strategy import Strategy

COPIES = 4
"""Graphs of one function that take turns. The marks of a graph must be read before it is replayed,
so this is also how many steps the program may run ahead of the GPU."""
MAX_FUNCTIONS = 8
"""Functions beyond this number run eagerly: each graph keeps memory."""


def capture_obstacle(
    config: RunConfig, device: torch.device, pipeline: InputPipeline, strategy: Strategy
) -> str | None:
    """Return why the steps of a run cannot be captured; None if they can.

    Collective if the communicator can be captured: then all ranks capture, or none.
    """
    communicator = strategy.replica.communicator
    obstacle = _own_obstacle(config, device, pipeline, strategy)
    if communicator.capture_obstacle() is None:
        # The dataset may fit on one GPU, but not on another.
        obstacle = first_value(communicator, obstacle)
    return obstacle


def _own_obstacle(
    config: RunConfig, device: torch.device, pipeline: InputPipeline, strategy: Strategy
) -> str | None:
    if (obstacle := settings_obstacle(config, device)) is not None:
        return obstacle
    if not isinstance(pipeline, ResidentPipeline):
        return "the training set does not fit in GPU memory"
    if config.sync_bn and strategy.replica.communicator.world_size > 1:
        return "--sync-bn communicates in the forward pass"
    return strategy.capture_obstacle()


def settings_obstacle(config: RunConfig, device: torch.device) -> str | None:
    """Return which setting prevents a capture, before strategy and data are set up."""
    if device.type != "cuda":
        return "the device is not a GPU"
    if config.cuda_graph == "off":
        return "--cuda-graph off"
    if config.slow:
        return "--slow sleeps in each step"
    if config.shares == ("auto",):
        return "--shares auto changes the batches"
    return None


class Graph(Protocol):
    def replay(self) -> None:
        """Launch the captured work."""


class GraphBackend(Protocol):
    def capture(self, function: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        """Record a function without running its GPU work; return the graph and its output."""


class ReplayObserver(Protocol):
    """Takes part in captures and replays, because its Python code does not run in a replay."""

    def capture(self) -> AbstractContextManager[Any]:
        """Record what the function reports, without counting it, during a `with` block."""

    def before_replay(self, captured: Any, /) -> None: ...

    def replayed(self, captured: Any, /) -> None:
        """Count what was recorded, for a replay that was just launched."""


class CudaGraphBackend:
    """Captures on the current stream, which must not be the default stream."""

    def __init__(self) -> None:
        self._pool: Any = None
        """Memory of the graphs, which they can share because they never run at the same time."""
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        """Graphs that use the pool."""

    def capture(self, function: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        # torch releases a pool with its last graph, and then rejects it.
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with _without_garbage_collection():
            # Other threads, such as the one that writes checkpoints, may use the GPU meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                output = function()
                graph.capture_end()
            except BaseException:
                self._abandon(graph)
                raise
        self._graphs.add(graph)
        return graph, output

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Return allocator and random generators to normal operation after a failed capture.

        torch does so only if the capture is valid.
        """
        # Ending an invalid capture fails, which would hide the cause.
        with suppress(Exception):
            graph.capture_end()
            return
        pool, self._graphs = self._pool, WeakSet()
        for end in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
            with suppress(Exception):
                end(torch.cuda.current_device(), pool)
        # A generator draws no numbers until the next valid capture ends.
        valid = torch.cuda.CUDAGraph()
        valid.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, device="cuda")
        valid.capture_end()


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Destroying an event or a graph is not allowed during a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(slots=True)
class CaptureReport:
    """How the steps of a worker ran; an entry of result.json."""

    captured: bool = False
    reason: str | None = None
    """Why steps ran eagerly; None if they were captured."""
    graphs: int = 0
    capture_seconds: float = 0.0


@dataclass(slots=True)
class _Captured:
    graph: Graph
    output: Tensor
    recorded: list[Any]
    """What each observer recorded."""


@dataclass(slots=True)
class _Function:
    eager_calls: int = 0
    copies: list[_Captured] = field(default_factory=list)
    next: int = 0


class GraphCache:
    """Runs functions eagerly at first, then captures and replays them.

    A function is identified by a key: equal keys must mean equal work. It returns one tensor.
    """

    def __init__(
        self,
        backend: GraphBackend,
        observers: Sequence[ReplayObserver],
        *,
        warmup: int,
        copies: int = COPIES,
        is_warm: Callable[[], bool] = lambda: True,
        model: nn.Module | None = None,
        agree: Callable[[str | None], str | None] = lambda reason: reason,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        """`on_failure` gets the reason after a failed capture; unless it raises, calls run eagerly.

        `model` is the model that the functions run, to notice what a graph would not repeat.
        `agree` returns why a capture failed on any rank: NCCL requires that all ranks replay an
        operation or none.
        """
        self.report = CaptureReport(reason="the run ended before the warm-up")
        self._backend, self._observers = backend, observers
        self._warmup, self._copies, self._is_warm = warmup, copies, is_warm
        self._model = model
        self._agree, self._on_failure = agree, on_failure
        self._functions: dict[Hashable, _Function] = {}
        self._last: _Function | None = None
        self._is_enabled = True

    def run(self, key: Hashable, function: Callable[[], Tensor]) -> Tensor:
        """Run a function, or replay its graph; the result stays valid after later calls."""
        known = self._functions.get(key)
        if known is None and len(self._functions) < MAX_FUNCTIONS:
            known = self._functions[key] = _Function()
        if known is None or not self._is_enabled or not self._is_due(known):
            self._last = known
            return function()
        # A function that alternates with others never waits for its own marks.
        if not known.copies or (known is self._last and len(known.copies) < self._copies):
            captured = self._capture(function)
            if captured is None:
                return function()
            known.next = len(known.copies)
            known.copies.append(captured)
        self._last = known
        return self._replay(known)

    def _is_due(self, known: _Function) -> bool:
        """Return whether a function is to be captured now; counts an eager call if not."""
        if known.copies:
            return True
        # Shapes after the first need one call only: libraries and optimizer are ready.
        is_first = all(not other.copies for other in self._functions.values())
        needed = self._warmup if is_first else 1
        if known.eager_calls >= needed and self._is_warm():
            return True
        known.eager_calls += 1
        return False

    def _capture(self, function: Callable[[], Tensor]) -> _Captured | None:
        began = perf_counter()
        state = _PythonState(self._model)
        try:
            with ExitStack() as stack:
                recorded = [stack.enter_context(each.capture()) for each in self._observers]
                graph, output = self._backend.capture(function)
            changed = state.changed()
        except Exception as error:  # noqa: BLE001 - the step can run eagerly instead
            changed = error_line(error)
        changed = self._agree(changed)
        if changed is not None:
            state.restore()
            self._give_up(changed)
            return None
        self.report.captured, self.report.reason = True, None
        self.report.graphs += 1
        self.report.capture_seconds += perf_counter() - began
        return _Captured(graph, output, recorded)

    def _give_up(self, reason: str) -> None:
        self._is_enabled = False
        self.report.captured, self.report.reason = False, reason
        self._functions.clear()
        if self._on_failure is not None:
            self._on_failure(reason)

    def _replay(self, known: _Function) -> Tensor:
        captured = known.copies[known.next]
        known.next = (known.next + 1) % len(known.copies)
        for observer, recorded in zip(self._observers, captured.recorded, strict=True):
            observer.before_replay(recorded)
        captured.graph.replay()
        for observer, recorded in zip(self._observers, captured.recorded, strict=True):
            observer.replayed(recorded)
        # The next replay overwrites it.
        return captured.output.clone()


class _PythonState:
    """State outside of tensors that a model may change in each pass, which a graph would not."""

    def __init__(self, model: nn.Module | None) -> None:
        self._python, self._torch = random.getstate(), torch.get_rng_state()
        self._numpy = np.random.get_state()
        self._modules = list(model.modules()) if model else []
        self._attributes = [_plain_attributes(module) for module in self._modules]

    def changed(self) -> str | None:
        """Return what changed since; None if nothing did."""
        numpy_state = np.random.get_state()
        if (
            random.getstate() != self._python
            or not torch.equal(torch.get_rng_state(), self._torch)
            or any(not np.array_equal(a, b) for a, b in zip(numpy_state, self._numpy, strict=True))
        ):
            return "the model draws random numbers on the CPU"
        for module, before in zip(self._modules, self._attributes, strict=True):
            for name, value in _plain_attributes(module).items():
                if name not in before or before[name] != value:
                    return f"the model changes {type(module).__name__}.{name} in each pass"
        return None

    def restore(self) -> None:
        random.setstate(self._python)
        torch.set_rng_state(self._torch)
        np.random.set_state(self._numpy)
        for module, before in zip(self._modules, self._attributes, strict=True):
            vars(module).update(before)


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if type(value) in (bool, int, float, str)
    }
