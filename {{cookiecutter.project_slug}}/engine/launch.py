"""torchrun, with the status of the process that failed and without a traceback of its own.

python -m engine.launch [torchrun's options] main.py [flags of main.py]
"""

import logging
import signal
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main() -> None:
    """Runs torchrun; exits with 0, the first failing process's status, or 128 + its signal."""
    # What the agent has to say about a failed process, that process has said already.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        run.main(sys.argv[1:])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            print(f"error: rank {rank} was ended by {name}", file=sys.stderr)
            sys.exit(128 - failure.exitcode)
        sys.exit(failure.exitcode)
    except SignalException as error:
        sys.exit(128 + error.sigval)


if __name__ == "__main__":
    main()
