"""torchrun, with the status of the process that failed and without a traceback of its own.

python -m engine.launch [torchrun's options] main.py [flags of main.py]

With --rdzv-backend=machines, several machines meet as engine/machines.py says.
"""

import logging
import os
import signal
import sys

from torch.distributed import DistError, run
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry

from engine import distributed
from engine.errors import BAD_USAGE
from engine.machines import Ended, Machines
from engine.watch import LAUNCHER, SIGNALS

STOP_S = 600  # for processes that were asked to stop; whoever asked may be less patient


def main() -> None:
    """Runs torchrun; exits with 0, the first failing process's status, or 128 + its signal."""
    os.environ[LAUNCHER] = str(os.getpid())
    # What the agent has to say about a failed process, that process has said already.
    logging.disable(logging.ERROR)
    for number in SIGNALS:  # the agent passes on two of them, once there are processes
        signal.signal(number, _pass_on)
    # The others of a job that failed can't save, and may not even hear: they wait for the one that
    # is gone. So they are not asked to stop, which the agent would wait half a minute for.
    api._get_default_signal = lambda: signal.SIGKILL
    LocalElasticAgent._stop_workers = _stop_at_once
    LocalElasticAgent._shutdown = _wait_for_the_last_save
    LocalElasticAgent._rendezvous = _meet_all
    LocalElasticAgent._start_workers = _count_rounds
    LocalElasticAgent._exit_barrier = _wait_for_the_other_machines
    LocalElasticAgent._monitor_workers = _without_needless_restart
    rendezvous_handler_registry.register("machines", _meet)
    status, sentence = _run()
    for number in SIGNALS:  # it ends already
        signal.signal(number, signal.SIG_IGN)
    for machines in _met:
        machines.leave(0 if machines.me.succeeded else status)
    if sentence:
        print(f"error: {sentence}", file=sys.stderr)
    distributed.leave(status)  # Python's clean-up aborts if a link is still in torch's code


def _run() -> tuple[int, str]:
    """The status to exit with, and what there is to say of it."""
    try:
        run.main(sys.argv[1:])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            return 128 - failure.exitcode, f"rank {rank} was ended by {name}"
        return failure.exitcode, ""
    except api.SignalException as error:
        return (0, "") if _is_complete else (128 + error.sigval, _unsaved)
    except Ended as error:
        return error.status, str(error)
    return 0, ""


_context: api.PContext | None = None  # of the processes
_waiting: list[int] = []  # signals to save, for which there were no processes


def _are_alive(context: api.PContext) -> bool:
    return any(one.proc.poll() is None for one in context.subprocess_handlers.values())


def _pass_on(number: int, _: object) -> None:
    if number == signal.SIGUSR1 and not (_context and _are_alive(_context)):
        _waiting.append(number)
        return
    raise api.SignalException("the processes are asked to stop", signal.Signals(number))


_met: list[Machines] = []
_unsaved = ""
_is_complete = False  # the run, for all the signal, which came too late


def _meet(params: RendezvousParameters) -> Machines:
    _met.append(Machines(params))
    return _met[0]


_rendezvous = LocalElasticAgent._rendezvous
_shutdown = LocalElasticAgent._shutdown
_start_workers = LocalElasticAgent._start_workers
_exit_barrier = LocalElasticAgent._exit_barrier
_monitor_workers = LocalElasticAgent._monitor_workers


def _meet_all(agent: LocalElasticAgent, group: WorkerGroup) -> None:
    """Meets again if a machine is lost before it has said what it starts."""
    while True:
        try:
            return _rendezvous(agent, group)
        except DistError:
            if not _met:
                raise


def _stop_at_once(agent: LocalElasticAgent, *_: object, **__: object) -> None:
    if agent._pcontext:
        agent._pcontext.close(signal.SIGKILL)


def _wait_for_the_last_save(agent: LocalElasticAgent, *args: object, **kwargs: object) -> None:
    """Waits longer than torch's half a minute for processes that end because of a signal."""
    global _unsaved, _is_complete
    error, context = sys.exc_info()[1], agent._pcontext
    if isinstance(error, api.SignalException) and context:
        context.close(error.sigval, STOP_S)
        ended = [handler.proc.returncode for handler in context.subprocess_handlers.values()]
        if not any(ended):
            for machines in _met:
                machines.wait_for_the_others()
            _is_complete = True
        if -signal.SIGKILL in ended:
            _unsaved = (
                f"a process was killed, {STOP_S} s after {error.sigval.name} or by another: its "
                "last step may not be saved"
            )
    _shutdown(agent, *args, **kwargs)


def _count_rounds(agent: LocalElasticAgent, group: WorkerGroup) -> dict[int, object]:
    """Has all machines count the same restarts, also one that was itself started again.

    SIGUSR1 waits until there are processes that can save. They begin with it blocked, and take it
    when they train.
    """
    global _context
    if _met:
        agent._remaining_restarts = group.spec.max_restarts - _met[0].round
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1,))
    started = _start_workers(agent, group)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR1,))
    _context = agent._pcontext
    for number in _waiting:
        _pass_on(number, None)
    return started


def _wait_for_the_other_machines(agent: LocalElasticAgent) -> None:
    """In place of torch's own, which lasts 300 s if one of them failed, and heeds no signal."""
    for machines in _met:
        machines.wait_for_the_others()
    if not _met:
        _exit_barrier(agent)


def _without_needless_restart(agent: LocalElasticAgent, *group: object) -> RunResult:
    """No restart after bad usage, or after a signal that asked all processes to stop."""
    result = _monitor_workers(agent, *group)
    final = {BAD_USAGE, *(128 + number for number in SIGNALS)}
    if any(failure.exitcode in final for failure in result.failures.values()):
        agent._remaining_restarts = 0
    return result


if __name__ == "__main__":
    main()
