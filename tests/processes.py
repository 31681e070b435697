"""Process groups that run functions together, as those of a training run do."""

import contextlib
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

COLLECTIVE_S = 20.0  # for one exchange between the processes
CALL_S = 60.0  # for one function
PATIENCE_S = 5.0  # for the others, after the first has failed


def begin_afresh(seed: int = 0) -> None:
    """Reset the random numbers and amp's casts before a test."""
    from apex_native import amp  # not before the variables of a process are set

    torch.manual_seed(seed)
    amp.initialize(torch.nn.Identity(), enabled=False)


def fork_server() -> ForkServerContext:
    """Return a context whose processes have torch imported, which takes seconds, once for all.

    A process has one fork server: only the libraries that are set before it starts are imported.
    """
    context = mp.get_context("forkserver")
    libraries = ["torch._dynamo", "torch.distributed.run", "torchvision", "tensorboard.summary"]
    libraries += ["pytest", "libcst.codemod.visitors"]
    context.set_forkserver_preload(libraries)
    return context


class Processes:
    """Processes of one group, kept for many calls, because starting them takes seconds.

    A call with a function of a module (not a local one) and its arguments runs it in each of them
    and returns a list of what they return, by rank. If one fails, AssertionError holds its
    traceback; if one hangs, all are ended in time. The next call then starts new ones.

    `variables` are added to their environment.
    """

    def __init__(self, backend: str = "gloo", world_size: int = 2, **variables: str) -> None:
        self.backend, self.world_size, self.variables = backend, world_size, variables
        self._processes: list[mp.Process] = []
        self._ends: list[Connection] = []

    def __call__(self, function: Callable, *args: object, **kwargs: object) -> list:
        if not self._processes:
            self._start()
        for end in self._ends:
            end.send_bytes(pickle.dumps((function, args, kwargs)))

        answers: dict[int, tuple[bool, object]] = {}
        deadline = time.monotonic() + CALL_S
        while len(answers) < self.world_size:
            awaited = [end for rank, end in enumerate(self._ends) if rank not in answers]
            ready = wait(awaited, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for end in ready:
                answers[self._ends.index(end)] = _receive(end)
            if not all(succeeded for succeeded, _ in answers.values()):
                deadline = min(deadline, time.monotonic() + PATIENCE_S)

        answers = {rank: answers.get(rank, (False, "no answer")) for rank in range(self.world_size)}
        failed = {rank: text for rank, (succeeded, text) in answers.items() if not succeeded}
        if failed:
            self.stop()
            raise AssertionError("\n".join(f"rank {rank}: {failed[rank]}" for rank in failed))
        return [result for _, result in answers.values()]

    def stop(self) -> None:
        """End the processes."""
        for process, end in zip(self._processes, self._ends, strict=True):
            process.kill()
            process.join()
            end.close()
        if self._processes:
            self._folder.cleanup()
        self._processes, self._ends = [], []

    def _start(self) -> None:
        # Some variables are to be there before torch is imported.
        context = mp.get_context("spawn") if self.variables else fork_server()
        self._folder = tempfile.TemporaryDirectory()  # they meet at a file, which needs no port
        path = os.path.join(self._folder.name, "group")
        for rank in range(self.world_size):
            end, others_end = context.Pipe()
            arguments = (others_end, self.backend, path, rank, self.world_size, self.variables)
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            others_end.close()
            self._processes.append(process)
            self._ends.append(end)


def _receive(end: Connection) -> tuple[bool, object]:
    """Return whether the function succeeded, and its result or the traceback."""
    try:
        return pickle.loads(end.recv_bytes())
    except EOFError:
        return False, "the process ended"


def _work(
    end: Connection,
    backend: str,
    path: str,
    rank: int,
    world_size: int,
    variables: dict[str, str],
) -> None:
    os.environ.update(variables)
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        init_method=f"file://{path}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=COLLECTIVE_S),
    )
    with contextlib.suppress(EOFError):  # the tests are over
        while True:
            call = end.recv_bytes()
            try:
                function, args, kwargs = pickle.loads(call)
                begin_afresh(rank)
                answer = pickle.dumps((True, function(*args, **kwargs)))
            except Exception:
                answer = pickle.dumps((False, traceback.format_exc()))
            end.send_bytes(answer)
