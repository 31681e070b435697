"""Comparison of versions, flags, project files and data between the processes of a run."""

import hashlib
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sized
from functools import cache
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from engine import PeerError, UserError, distributed, fingerprint, log_line

LIBRARIES = ("engine/", "apex_native/")  # files that are not the owner's
MAX_CLOCK_DIFFERENCE_S = 5.0  # torchrun's rendezvous takes a host that is 15 s behind for lost
IGNORED = -100  # label without a loss, by default, in torch's
HOST_SETTINGS = ("data", "cache_dir", "cache_size", "output", "workers")  # may differ between hosts

Facts = dict[str, str]


def collect_facts(device: torch.device, settings: dict[str, object], backend_name: str) -> Facts:
    """Return what must be the same in all processes: versions, flags and the project's files.

    Args:
        settings: values of the flags by name; HOST_SETTINGS are ignored.
        backend_name: the Apex implementation in use.
    """
    facts = {
        "torch": torch.__version__,
        "Python": platform.python_version().rpartition(".")[0],
        "torchvision": version("torchvision"),
        "the kind of device": device.type,
        "Apex's backend": backend_name,
        "WORLD_SIZE": os.environ.get("WORLD_SIZE", "1"),
    }
    for name, value in settings.items():
        if name not in HOST_SETTINGS:
            facts[f"--{name.replace('_', '-')}"] = str(value)
    _digest.cache_clear()  # of an earlier run in this notebook
    return facts | file_digests()


def file_digests(owners: bool = False) -> Facts:
    """Return the digests of the project's files that this process has loaded, by their paths.

    A file is read once after each `collect_facts`: it may be edited while the run reads its data.

    Args:
        owners: leave out the LIBRARIES.
    """
    project = Path(__file__).parent.parent.parent
    modules = [*sys.modules.values()]  # a thread may import others
    files = {Path(getattr(module, "__file__", None) or "/") for module in modules}
    names = ("run.sh", "main.py", "task.py", "engine/launch.py")  # --check's ranks import none
    files |= {project / name for name in names}
    digests = {
        str(path.relative_to(project)): _digest(path)
        for path in sorted(files)
        # The environment may be in the project's folder, too.
        if path.is_relative_to(project) and "site-packages" not in path.parts and path.is_file()
    }
    if not owners:
        return digests
    return {name: digest for name, digest in digests.items() if not name.startswith(LIBRARIES)}


@cache
def _digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()[:10]


def store_facts(store: dist.Store, rank: int, facts: Facts) -> None:
    """Store the facts of a process, and the name of its host, for `compare_facts`."""
    store.set(f"facts {rank}", json.dumps([socket.gethostname(), facts]))


def compare_facts(store: dist.Store, world_size: int) -> str:
    """Return a message about a difference between the facts that all processes have stored."""
    ranks = range(world_size)
    return find_difference({rank: json.loads(store.get(f"facts {rank}")) for rank in ranks})


def require_same_facts(store: dist.Store, rank: int, world_size: int, facts: Facts) -> None:
    """Raise UserError in all processes if `facts` differ between two of them.

    Raises PeerError if a process does not arrive before the store's timeout. Rank 0 compares; the
    others wait for its result.
    """
    store_facts(store, rank, facts)
    missing = missing_ranks(
        store, "facts", world_size, wait_for=None if rank == 0 else "difference"
    )
    if missing:
        raise PeerError(
            f"rank {missing} of {world_size} did not come: start what is missing, or look at its "
            "output"
        )
    if rank == 0:
        store.set("difference", json.dumps([time.time(), compare_facts(store, world_size)]))
    rank_0_time, difference = json.loads(store.get("difference"))
    if difference:
        raise UserError(difference)
    problem = clock_problem(rank_0_time, "rank 0's")  # all processes have waited for this
    if problem and distributed.is_local_leader():
        log_line(f"warning: {problem}")


def clock_problem(their_time: float, whose: str) -> str:
    """Return a message if the clock of this host differs too much from another one.

    Args:
        their_time: the time on that clock now, in seconds since 1970.
        whose: for the message, such as "rank 0's".
    """
    seconds = time.time() - their_time
    if abs(seconds) <= MAX_CLOCK_DIFFERENCE_S:
        return ""
    return f"the clock of {socket.gethostname()} is {seconds:+.0f} s from {whose}: set both by NTP"


def missing_ranks(
    store: dist.Store, kind: str, world_size: int, wait_for: str | None = None
) -> str:
    """Return the ranks whose key "`kind` <rank>" is not stored before the store's timeout.

    They are separated by commas; the result is an empty string if the wait succeeds.

    Args:
        wait_for: another key to wait for instead of those of all ranks.
    """
    keys = [f"{kind} {rank}" for rank in range(world_size)]
    try:
        store.wait([wait_for] if wait_for else keys)
    except dist.DistStoreError:
        return ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key]))
    return ""


def find_difference(facts_by_rank: dict[int, tuple[str, Facts]]) -> str:
    """Return a message about the first fact that is not the same in all processes, if any.

    Processes may have loaded different files: a fact that only one of them has is no difference.

    Args:
        facts_by_rank: host name and facts of each process; those of rank 0 are the reference.
    """
    host, expected = facts_by_rank[0]
    for rank, (name, facts) in facts_by_rank.items():
        for fact, value in expected.items():
            if facts.get(fact, value) != value:
                return (
                    f"{fact} is {facts[fact]} on {name} (rank {rank}) but {value} on {host} "
                    "(rank 0): give all hosts the same versions, code, flags and data"
                )
    return ""


def _require_positions(data_set: Sized, split: str, num_classes: int) -> None:
    """Raise UserError if labels are no positions in the list of classes, such as 1 to N.

    A loss on a GPU ends the process for such a label, without a message about it.
    """
    labels = fingerprint.labels_of(data_set) or ()
    positions = {label for label in labels if type(label) is int}
    allowed = {*range(num_classes), *([IGNORED] if split == "training" else [])}
    if num_classes and positions - allowed:
        also = f", or {IGNORED} for a sample without a loss" if split == "training" else ""
        raise UserError(
            f"the {split} data has the label {max(positions - allowed)}: labels must be 0 to "
            f"{num_classes - 1}, the positions in its list of {num_classes} classes{also}"
        )


def class_names(data_set: object) -> list[str]:
    """Return the names of the classes of a data set, its ``.classes``; none without it.

    Raises UserError for a number of classes, or a dict, whose keys may be names or labels.
    """
    names = getattr(data_set, "classes", ())
    if isinstance(names, Mapping) or not isinstance(names, Iterable):
        kind = type(names).__name__
        raise UserError(f".classes of a data set must be the list of their names, not {kind}")
    return [str(name) for name in names]


def require_same_data(train_set: Sized, val_set: Sized) -> None:
    """Raise UserError, in all processes, if the data sets differ between two of them.

    Each host may have its own copy of the data: numbers of samples, classes and fingerprints must
    be the same, and the form of the training data, on which the order of its samples may depend.
    The two sets must have the same classes, since a label is a position in the list.
    """
    classes = class_names(train_set)
    pairs = zip_longest(classes, class_names(val_set), fillvalue="missing")
    for index, (one, other) in enumerate(pairs):
        if one != other:
            raise UserError(
                f"class {index} is {one} in the training data and {other} in the validation data: "
                "give both the same list of classes"
            )
    sets = {"training": train_set, "validation": val_set}
    for split, data_set in sets.items():
        if isinstance(data_set, IterableDataset) or not hasattr(data_set, "__len__"):
            raise UserError(
                f"the {split} data, of type {type(data_set).__name__}, is iterable or has no "
                "length: a sampler gives each process its samples by index, so use a map-style one"
            )
    facts = {
        "the number of samples to train on": str(len(train_set)),
        "the number of samples to validate on": str(len(val_set)),
        "the number of classes": str(len(classes)),
        **{f"class {index}": name for index, name in enumerate(classes)},
    }
    for split, data_set in sets.items():
        if not len(data_set):
            raise UserError(f"the {split} data has no samples: correct its data set in task.py")
        _require_positions(data_set, split, len(classes))
        digests = fingerprint.of_data_set(data_set)
        if split == "training":  # others may have its samples in another order
            sizes = getattr(data_set, "shard_sizes", ())
            local = "a local pack" if "pack" in digests else "not a pack"
            facts["the form of the training data"] = "a pack by URL" if sizes else local
            facts["the digest of the sizes of its shards"] = fingerprint.digest(sizes)
        for part, value in digests.items():
            facts[f"the digest of the {part} of the {split} data"] = value
    rank = dist.get_rank()
    own = (socket.gethostname(), facts)
    reference = [own]
    dist.broadcast_object_list(reference)
    difference = find_difference({0: reference[0], rank: own})
    differences = distributed.all_gather(difference, dist.group.WORLD)
    if any(differences):
        raise UserError(next(filter(None, differences)))
