"""One worker process of a group: connects, then serves requests.

python -m peer_comparison.worker CONTENDER SOCKET
"""

from __future__ import annotations

import gc
import os
import socket
import statistics
import sys
from multiprocessing.connection import Connection
from time import perf_counter

import torch
from torch.optim import SGD

from paceline.models.build import build_model
from peer_comparison.contenders import (
    Accelerate,
    Contender,
    DeepSpeed,
    Fabric,
    Mpi,
    Paceline,
    Single,
    TorchDdp,
    Update,
)
from peer_comparison.messages import (
    AllReduce,
    Answer,
    Copy,
    Hello,
    Prepare,
    Prepared,
    Refusal,
    Request,
    Train,
)

SHAPE, CLASSES = (3, 32, 32), 10
TIMED_LEARNING_RATE = 1e-5
"""Small, because blocks differ in their number of updates and must not change the weights much."""

CONTENDERS: dict[str, type[Contender]] = {
    "single": Single,
    "apart": Single,
    "ddp": TorchDdp,
    "fabric": Fabric,
    "accelerate": Accelerate,
    "deepspeed": DeepSpeed,
    "mpi4py": Mpi,
}


def main() -> None:
    name, address = sys.argv[1:]
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    contender = CONTENDERS[name]() if name in CONTENDERS else Paceline(name)
    contender.connect()
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(address)
        pipe: Connection = Connection(line.detach())
    pipe.send(Hello(contender.rank, os.getpid()))
    Worker(contender).serve(pipe)
    contender.close()


class Worker:
    def __init__(self, contender: Contender) -> None:
        self._contender = contender
        self._update: Update | None = None
        self._tensors: dict[tuple[str, int], torch.Tensor] = {}

    def serve(self, pipe: Connection) -> None:
        """Serve until the controlling process disconnects."""
        while True:
            try:
                request = pipe.recv()
            except EOFError:
                break
            try:
                answer: Answer | Refusal = self._answer(request)
            except Exception as error:  # noqa: BLE001 (whatever a library raises is its reason)
                first_line = (str(error).splitlines() or [""])[0]
                answer = Refusal(f"{type(error).__name__}: {first_line}")
            pipe.send(answer)
        self._release()

    def _answer(self, request: Request) -> Answer:
        match request:
            case Prepare():
                return self._prepare(request)
            case Train(updates):
                return self._train(updates)
            case AllReduce():
                return self._all_reduce(request)
            case Copy(size_bytes, times):
                return self._copy(size_bytes, times)

    def _prepare(self, request: Prepare) -> Prepared:
        self._release()
        model = build_model(request.model, SHAPE, CLASSES, seed=0)
        # A separate random stream per worker, independent of earlier draws.
        torch.manual_seed(1000 + self._contender.rank)
        inputs = torch.randn(request.batch_per_worker, *SHAPE)
        labels = torch.randint(CLASSES, (request.batch_per_worker,))
        optimizer = SGD(model.parameters(), lr=request.learning_rate, momentum=0.9, fused=True)
        update = self._update = self._contender.prepare(model, optimizer, inputs, labels)
        torch.manual_seed(2000 + self._contender.rank)  # For dropout.
        losses, seconds = [], []
        for _ in range(request.updates):
            began = perf_counter()
            losses.append(update().item())
            seconds.append(perf_counter() - began)
        for group in optimizer.param_groups:
            group["lr"] = TIMED_LEARNING_RATE
        usual_seconds = statistics.median(seconds[request.updates // 2 :])
        return Prepared(losses[0], losses[-1], usual_seconds)

    def _train(self, updates: int) -> float:
        if self._update is None:
            raise RuntimeError("nothing is prepared")
        self._update()  # Workers receive their requests at slightly different times.
        began = perf_counter()
        for _ in range(updates):
            self._update()
        return (perf_counter() - began) / updates

    def _all_reduce(self, request: AllReduce) -> float:
        key = f"all_reduce, {request.is_plain}", request.size_bytes
        tensor = self._tensors.get(key)
        if tensor is None:
            tensor = self._tensors[key] = self._checked_tensor(request)
        self._contender.all_reduce(tensor)
        began = perf_counter()
        for _ in range(request.times):
            self._contender.all_reduce(tensor)
        return (perf_counter() - began) / request.times

    def _checked_tensor(self, request: AllReduce) -> torch.Tensor:
        """Zeros stay zeros when summed repeatedly; correct sums were checked before."""
        self._forget_sizes_but(request.size_bytes)
        contender, elements = self._contender, request.size_bytes // 4
        tensor = torch.empty(elements) if request.is_plain else contender.tensor_to_sum(elements)
        tensor.fill_(float(contender.rank + 1))
        contender.all_reduce(tensor)
        if not bool((tensor == float(sum(range(1, contender.world_size + 1)))).all()):
            raise ArithmeticError(f"wrong sum of {request.size_bytes} bytes")
        return tensor.mul_(0)

    def _forget_sizes_but(self, size_bytes: int) -> None:
        self._tensors = {key: each for key, each in self._tensors.items() if key[1] == size_bytes}

    def _copy(self, size_bytes: int, times: int) -> float:
        for name in ("source", "target"):
            if (name, size_bytes) not in self._tensors:
                self._tensors[name, size_bytes] = torch.full((size_bytes // 4,), 1.0)
        source, target = self._tensors["source", size_bytes], self._tensors["target", size_bytes]
        target.copy_(source)
        began = perf_counter()
        for _ in range(times):
            target.copy_(source)
        return (perf_counter() - began) / times

    def _release(self) -> None:
        self._update = None
        self._tensors.clear()
        self._contender.release()
        gc.collect()


if __name__ == "__main__":
    main()
