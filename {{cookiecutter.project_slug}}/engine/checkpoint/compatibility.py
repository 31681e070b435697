"""Comparison of a checkpoint with the data and the settings of the run that loads it.

Arguments: `path` is that of the checkpoint, `entries` are its entries, `saved` its metadata, `own`
that of this run, whose `data_sets` are "train" and "val"; `warn` is called with a message.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch.distributed as dist

from engine import UserError, distributed, fingerprint, read_text, summarize
from engine.checkpoint import format, selection
from engine.data import SizedDataset
from engine.data.images import ImageSpec
from engine.distributed import consistency
from engine.launch import LAUNCH_ID
from engine.monitoring.logger import Logger
from engine.monitoring.run_files import CONFIG, DISCARDED, FILES, LAUNCH
from engine.text import printable

DataSets = Mapping[str, SizedDataset]  # by name, such as "train"
MAY_DIFFER = {*consistency.HOST_SETTINGS, "steps", "resume"}  # when a run continues
UNREADABLE = (OSError, ValueError, TypeError, RecursionError)  # of a damaged config.json
NO_MODEL = ("image", "drop_rate", "drop_path")  # model_options that a trained model does not show


def was_begun(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Return whether the run in the folder is one that this launch began, and a restart continues.

    Without run.sh, a launch has no id: the run is taken for its own. Raises UserError if that has
    other settings.
    """
    try:
        theirs = _read_config(folder)
        is_own = _is_of_this_launch(theirs)
    except FileNotFoundError:
        return LAUNCH_ID not in distributed.launch_ids()
    except UNREADABLE as error:
        raise UserError(
            f"{folder / CONFIG} can't be read ({shorten(str(error), 80)}): add --resume auto to "
            "continue the run there, or --output with another folder"
        ) from None
    if is_own and (changed := _changed_settings(theirs, settings)):
        raise UserError(
            f"{folder} holds a run with {changed}: add --resume auto to continue it, or --output "
            "with another folder"
        )
    return is_own


def log_changed_settings(
    folder: Path, settings: Mapping[str, Any], log: Callable[[str], None]
) -> None:
    """Log settings other than those in the folder, as after an edit of a --config file."""
    with suppress(*UNREADABLE):
        ignored = MAY_DIFFER - {"data"}
        if changed := _changed_settings(_read_config(folder), settings, ignored):
            log(f"the run in {folder} was started with {changed}")


def warn_of_start(folder: Path, warn: Callable[[str], None]) -> None:
    """Warn if the run in the folder, which has not saved, was started with other files.

    That is with others of the owner's, or from a checkpoint.
    """
    with suppress(*UNREADABLE):
        config = _read_config(folder)
        if (resumed := config.get("resume")) not in (None, "auto"):
            warn(f"the run in {folder} was started with --resume {resumed}: add that to repeat it")
        started = {"files": dict(config.get(FILES, {}))}
        warn_of_changed_files(str(folder / CONFIG), started, warn, is_training=True)


def _read_config(folder: Path) -> dict[str, Any]:
    return dict(json.loads(read_text(folder / CONFIG)))


def _is_of_this_launch(config: Mapping[str, Any]) -> bool:
    """Return whether this launch wrote the contents of a config.json; without an id, it did."""
    ids, launch = distributed.launch_ids(), dict(config.get(LAUNCH, {}))
    has_id = LAUNCH_ID in ids
    if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":  # a job may launch several runs
        ids.pop("SLURM_JOB_ID", None)
    return not has_id or any(launch.get(name) == value for name, value in ids.items())


def _changed_settings(
    theirs: Mapping[str, Any], settings: Mapping[str, Any], ignored: Set[str] = MAY_DIFFER
) -> str:
    """Return the settings that differ, with both values; "" if none do."""
    ours = json.loads(json.dumps(settings, default=str))
    compared = (ours.keys() & theirs.keys()) - ignored
    changed = sorted(name for name in compared if theirs[name] != ours[name])
    return summarize([f"{name} {theirs[name]} and not {ours[name]}" for name in changed])


def read_discarded(folder: Path) -> list[int]:
    """Return the times of the checkpoints from which the run in `folder` has gone back."""
    try:
        return list(map(int, _read_config(folder).get(DISCARDED, [])))
    except (*UNREADABLE, OverflowError):
        return []


def describe_data(data_sets: DataSets) -> dict[str, Any]:
    """Return the entries of the metadata about data sets: their sizes, fingerprints and order.

    "by_shard" is True if the order keeps the samples of a shard near one another.
    """
    return {
        "by_shard": bool(getattr(data_sets.get("train"), "shard_sizes", ())),
        "samples": {name: len(data_set) for name, data_set in data_sets.items()},
        "fingerprints": {
            name: fingerprint.of_data_set(data_set) for name, data_set in data_sets.items()
        },
    }


def use_saved_classes(
    data_sets: DataSets, folder: Path, choice: Path | None, logger: Logger, timeout_s: float
) -> None:
    """Give the data sets of an evaluation the classes of its checkpoint; all ranks call it.

    The classes of the data may be some of the checkpoint's, in any order. The model is built for
    those of the data sets, so this is called before; a checkpoint that can't be read is reported
    when it is resumed.

    Args:
        choice: the checkpoint, as for `CheckpointManager.resume`.
        timeout_s: limit of an operation between the ranks.

    Raises UserError if the data has other classes.
    """
    own = consistency.class_names(data_sets["val"])
    if not own:
        return
    group = dist.new_group(backend="gloo", timeout=distributed.operation_limit(timeout_s))
    assert isinstance(group, dist.ProcessGroup)  # every rank is in it
    source = selection.find(folder, choice, logger.warning, group)
    if source is None:
        return
    saved: list[str] = []
    if dist.get_rank() == source.rank:
        with suppress(UserError):
            saved = format.load_state(source.path)["metadata"].get("classes", [])
    saved = distributed.all_gather(saved, group)[source.rank]
    if adapt_classes(source.path, saved, own, data_sets, is_evaluation=True):
        missing = [printable(name) for name in saved if name not in own]
        without = f"; the data has no {summarize(missing)}" if missing else ""
        logger.info(f"evaluating with the {len(saved)} classes of {source.path}{without}")


def compare_metadata(
    path: Path,
    saved: Mapping[str, Any],
    own: dict[str, Any],
    data_sets: DataSets,
    warn: Callable[[str], None],
) -> str:
    """Compare classes, images and opt_level with a checkpoint's; return notes for the log.

    Raises UserError if the classes do not fit.
    """
    notes = adapt_classes(path, saved.get("classes", []), own.get("classes", []), data_sets)
    if notes:
        own["classes"] = saved["classes"]
    if images := compare_images(saved, own):
        warn(f"--resume {path}: it was trained with other images ({images})")
    if options := compare_options(saved, own):
        warn(f"--resume {path}: its model has other options ({options})")
    arch = own.get("arch")
    if arch and saved.get("arch", arch) != arch:
        warn(f"--resume {path}: it is of --arch {saved['arch']}, and this run of {arch}")
    opt_level = own.get("opt_level")
    if saved.get("opt_level", opt_level) != opt_level:
        notes += f", saved at {saved['opt_level']}"
    return notes


def adapt_classes(
    path: Path, saved: list[str], own: list[str], data_sets: DataSets, is_evaluation: bool = False
) -> str:
    """Give the data sets the checkpoint's order of classes; return what to add to the message.

    Labels are positions in the list of classes, so a checkpoint fits only data of the same list. A
    data set of the same classes in another order is changed by its method ``reorder_classes``.

    Args:
        is_evaluation: the data may lack some of the classes.

    Raises UserError if the classes differ, or a data set cannot change their order.
    """
    if not saved or saved == own:
        return ""
    difference = describe_difference(saved, own)
    if difference and not (is_evaluation and Counter(own) <= Counter(saved)):
        raise UserError(
            f"--resume {path}: it was trained on other classes ({difference}): give the classes "
            f"their old names, or start from its weights, with a new head, by --weights {path}"
        )
    can_reorder = all(hasattr(data_set, "reorder_classes") for data_set in data_sets.values())
    if len(set(own)) < len(own) or not can_reorder:
        pairs = list(zip_longest(saved, own, fillvalue="none"))
        index = [one != other for one, other in pairs].index(True)
        raise UserError(
            f"--resume {path}: its classes have another order than those of the data: class "
            f"{index} is {printable(saved[index])} there and {printable(pairs[index][1])} here; "
            "restore that order, or give the data sets a method reorder_classes(names)"
        )
    for data_set in data_sets.values():
        data_set.reorder_classes(saved)  # type: ignore[attr-defined]  # checked above
    return ", with the labels of the data in its order of the classes"


def require_same_frozen(path: Path, saved: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Raise UserError if a checkpoint was trained with other frozen parameters than this run's.

    The optimizer's moments are saved by position, and would be those of other parameters. If only
    one of the two has frozen parameters, the numbers of moments differ.
    """
    if not ("frozen" in saved and "frozen" in own):
        return
    names = sorted(saved["frozen"]), sorted(own["frozen"])
    if difference := describe_difference(*names, "frozen only there", "frozen only here"):
        raise UserError(
            f"--resume {path}: it was trained with another --freeze ({difference}): resume "
            f"with the same, or start from its weights by --weights {path}"
        )


def warn_of_changed_files(
    checkpoint: str, saved: Mapping[str, Any], warn: Callable[[str], None], is_training: bool
) -> None:
    """Warn if the project's files are not those with which a checkpoint was saved.

    Args:
        checkpoint: its path, or the flag and its path.
        saved: its metadata.
        is_training: compare main.py and the engine, too, and not only the owner's model and data.
    """
    there, here = saved.get("files", {}), consistency.file_digests()
    changed = [name for name in here if there.get(name, here[name]) != here[name]]
    changed.sort(key=lambda name: "/" in name)  # the owner's files first
    if not is_training:
        others = ("main.py", "run.sh", *consistency.LIBRARIES)
        changed = [name for name in changed if not name.startswith(others)]
    if changed:
        warn(f"{checkpoint}: files differ from those that saved it: {summarize(changed)}")


def describe_difference(
    saved: list[str],
    own: list[str],
    there: str = "only in the checkpoint",
    here: str = "only in the data",
) -> str:
    """Return the names that only one of two lists has, after its title; "" if there are none."""
    sides = {there: Counter(saved) - Counter(own), here: Counter(own) - Counter(saved)}
    return "; ".join(
        f"{side}: {summarize([printable(name) for name in names.elements()])}"
        for side, names in sides.items()
        if names
    )


def compare_data(saved: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, str]:
    """Return what differs in each data set whose number of samples or fingerprint does.

    Digests are compared that both fingerprints have: older checkpoints have none, and a folder has
    others than a pack of it.
    """
    changes = {}
    for name, count in own["samples"].items():
        there = saved.get("samples", {}).get(name, count)
        known = saved.get("fingerprints", {}).get(name, {})
        digests = own["fingerprints"][name]
        parts = [part for part in digests if known.get(part, digests[part]) != digests[part]]
        if there != count:
            changes[name] = f"{there} samples there, {count} here"
        elif parts:
            changes[name] = f"other {' and '.join(parts)}"
    return changes


def is_validation_set(data_set: SizedDataset, saved: Mapping[str, Any]) -> bool:
    """Return whether `data_set` has the size and contents of the one that a checkpoint names."""
    return not compare_data(saved, describe_data({"val": data_set}))


def warn_of_changed_data(
    path: Path,
    entries: Mapping[str, Any],
    own: Mapping[str, Any],
    is_evaluation: bool,
    warn: Callable[[str], None],
) -> None:
    """Warn of data, or an order of it, other than a checkpoint's; it may have grown on purpose.

    Args:
        is_evaluation: only the validation data matters.
    """
    metadata = entries["metadata"]
    changes = compare_data(metadata, own)
    seed = metadata.get("seed")
    has_other_seed = isinstance(seed, int) and seed != own.get("seed", seed)
    if is_evaluation:
        if "val" in changes:
            warn(
                f"--resume {path}: this is other data than it was validated on in training "
                f"({changes['val']})"
            )
        if has_other_seed and is_same_val_data(metadata, own) is None:
            warn(
                f"--resume {path}: it has --seed {seed}, and this run another: if the validation "
                "data is split off at random, this is another split"
            )
        return
    rest = "; the rest of its epoch may repeat or leave out samples" if entries["samples"] else ""
    if changes:
        text = ", ".join(f"{name}: {change}" for name, change in changes.items())
        warn(f"--resume {path}: the data has changed ({text}{rest if 'train' in changes else ''})")
    known = metadata.get("fingerprints", {}).get("train", {})
    digests = own["fingerprints"].get("train", {})
    by_shard = own.get("by_shard", False)
    problem = ""
    if has_other_seed:
        problem = f"it has --seed {seed}, which orders and augments the data, and this run another"
    elif known and digests and not known.keys() & digests.keys():  # of a folder and of a pack
        problem = "the order of its data can't be compared with that of this data"
    elif metadata.get("by_shard", by_shard) != by_shard:
        problem = "data that is read by URL has another order than local data"
    if problem and (rest or has_other_seed):
        warn(f"--resume {path}: {problem}{rest}")


def compare_scores(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Return why a checkpoint's scores can't be compared with this run's, or an empty string."""
    change = compare_metrics(saved, own) or compare_validation(saved, own)
    is_other = not change and is_same_val_data(saved, own) is False
    return "the validation data has changed" if is_other else change


def compare_metrics(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Return how the metric that selects best.pt has changed, or an empty string.

    Names that a checkpoint lacks have not changed: other scripts' have none, old ones no mode.
    """
    ours = {name: own[name] for name in ("metric", "metric_mode") if name in own}
    theirs = {name: saved.get(name, value) for name, value in ours.items()}
    if theirs == ours:
        return ""
    before, now = (" ".join(values.values()) for values in (theirs, ours))
    return f"the metric was {before} and is {now} now (METRIC in task.py)"


def compare_validation(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Return how the validation of the same images has changed, or an empty string."""
    theirs, ours = (image.for_eval()._asdict() for image in _images_of(saved, own))
    flips = own.get("flip_tta")
    theirs |= {"eval_size": None, "--flip-tta": saved.get("flip_tta", flips)}
    ours |= {"eval_size": None, "--flip-tta": flips}
    changed = [
        f"{name} {value} and not {theirs[name]}"
        for name, value in ours.items()
        if theirs[name] != value
    ]
    return f"the validation has {', '.join(changed)} now" if changed else ""


def compare_images(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Return how the images of a checkpoint's metadata differ, as "size 32 there and 224 here".

    An `eval_size` of the run is no difference: it is meant to be another one.
    """
    theirs, ours = (image._asdict() for image in _images_of(saved, own))
    texts = [
        f"{name} {theirs[name]!r} there and {value!r} here"
        for name, value in ours.items()
        if theirs[name] != value and not (name == "eval_size" and value)
    ]
    return printable(", ".join(texts))


def _images_of(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[ImageSpec]:
    """Return the images of a checkpoint and of this run; twice the same if one is unknown.

    Without an entry they are ImageSpec's defaults, but for the digits, whose size is the task's,
    and for checkpoints of other scripts.
    """
    theirs, ours = (
        one.get("model_options", {}).get("image", {} if one.get("data", "unknown") else None)
        for one in (saved, own)
    )
    if "model_options" not in saved or theirs is None:
        theirs = ours
    elif ours is None:
        ours = theirs
    return [ImageSpec(**image or {}) for image in (theirs, ours)]


def compare_options(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Return how the owner's options of the model differ, as "scale 2 there and 1 here"."""
    if "model_options" not in saved:  # older, or of another script
        return ""
    theirs, ours = (  # as texts, since values may be tensors; tuples are lists, or skipped as keys
        {name: json.dumps(v, default=repr, skipkeys=True) for name, v in options.items()}
        for options in (saved["model_options"], own.get("model_options", {}))
    )
    texts = [
        f"{name} {theirs[name]} there and {value} here"
        for name, value in ours.items()
        if name not in NO_MODEL and theirs.get(name, value) != value
    ]
    return printable(shorten(", ".join(texts), 200))


def is_same_val_data(saved: Mapping[str, Any], own: Mapping[str, Any]) -> bool | None:
    """Return whether the validation data is that of a checkpoint; None if that is unknown."""
    if "val" in compare_data(saved, own):
        return False
    known = saved.get("fingerprints", {}).get("val", {}).keys()
    digests = own["fingerprints"].get("val", {}).keys()
    # Equal labels of a folder and of a pack do not show that their images are the same.
    return True if known and digests and (known <= digests or digests <= known) else None
