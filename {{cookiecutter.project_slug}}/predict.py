"""Run inference with a trained model on image files.

python predict.py runs/NAME/best.pt cat.jpg dog.png    one line for each
python predict.py runs/NAME/best.pt FOLDER --json      all images of a folder, as JSON lines
python predict.py runs/NAME/best.pt --export net.onnx  the model as a file for other programs
"""

# First: task.py may draw random numbers when it is imported.
from engine import startup  # noqa: F401  # isort: skip

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import nn

import task
from engine import OutageError, UserError, cli, distributed
from engine.checkpoint import format as checkpoint_format
from engine.checkpoint.archive import security_warning
from engine.checkpoint.compatibility import warn_of_changed_files
from engine.checkpoint.restore import build_with
from engine.data.folders import list_images
from engine.export import export_model
from engine.monitoring.meter import NanCounter
from engine.text import json_line, one_message, printable


def parse_args() -> argparse.Namespace:
    """Return the flags."""
    parser = cli.ArgumentParser(description="Run inference with a trained model on image files.")
    add = parser.add_argument
    help = "of a run, such as best.pt; with --ema, the better weights are used"
    add("checkpoint", type=cli.path, help=help)
    add("images", type=cli.local_path, nargs="*", metavar="FILE|FOLDER", help="images to predict")
    add = parser.group("inference").add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU, if any")
    add("--json", action="store_true", help="print JSON lines")
    add("--export", type=cli.local_path, metavar="FILE", help="write the model as .onnx or .pt2")
    task.add_predict_arguments(parser)
    args = parser.parse_args()
    if bool(args.images) == bool(args.export):
        parser.error("give either image files or --export FILE")
    if args.export and args.export.resolve() == args.checkpoint.resolve():
        parser.error(f"--export {args.export} is the checkpoint itself; name another file")
    if args.export:
        # The defaults: other values would have no effect.
        alone = vars(parser.parse_args([str(args.checkpoint), f"--export={args.export}"]))
        others = sorted(name for name, value in vars(args).items() if value != alone[name])
        if flags := ", ".join(f"--{name.replace('_', '-')}" for name in others):
            parser.error(f"--export writes the model alone: leave out {flags}")
    return args


def find_images(paths: list[Path]) -> Iterator[Path]:
    """Yield the files among `paths` and the images inside the folders among them."""
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: there is no such file or folder")
        if not path.is_dir():
            yield path
            continue
        found = list_images(path)
        if not found:
            raise UserError(f"{path} holds no images, such as NAME.jpg or NAME.png")
        yield from sorted(map(Path, found))


def load_model(path: Path) -> tuple[nn.Module, dict]:
    """Return the trained model, in fp32 on the CPU, and the metadata of its checkpoint."""

    def warn(message: str) -> None:
        print(f"warning: {message}", file=sys.stderr)

    if warning := security_warning(path):
        warn(warning)
    state = checkpoint_format.load(path)
    metadata = state["metadata"]
    if not {"metric", "arch", "data"} <= metadata.keys():
        raise UserError(
            f"{path}: it has no metadata of its model and classes; resume it for an epoch "
            f"(./run.sh --resume {path} --epochs N), and use the checkpoint that this saves"
        )
    if metadata["metric"] != task.METRIC:
        raise UserError(
            f"{path}: it is of another task, or METRIC in task.py was renamed: it has "
            f"{metadata['metric']}, not {task.METRIC}; use predict.py of the project that made it"
        )
    try:
        num_classes = len(metadata.setdefault("classes", []))
        options = metadata.setdefault("model_options", {})  # which older checkpoints lack
        build = partial(task.build_model, metadata["arch"], num_classes, **options)
        weights = state[checkpoint_format.best_weights(state)]
        model = build_with(weights, build, metadata.get("seed"))
    except (RuntimeError, TypeError, AttributeError, LookupError, ValueError) as error:
        raise UserError(
            f"{path}: its weights do not fit {metadata['arch']} as task.py builds it now; use the "
            f"task.py that it was trained with ({shorten(str(error), 160)})"
        ) from None
    warn_of_changed_files(printable(path), metadata, warn, is_training=False)
    model.eval()
    return model, metadata


def sample_inputs(options: dict[str, Any], batch_size: int) -> Any:
    """Return a batch of synthetic inputs of a model with these options, on the CPU."""
    image = options.get("image")
    if isinstance(image, dict) and image.get("eval_size"):
        options = options | {"image": image | {"size": image["eval_size"]}}
    try:
        batch = task.dummy_batch(batch_size, torch.device("cpu"), **options)
    except TypeError as error:
        raise UserError(
            f"the checkpoint's model_options don't fit dummy_batch of task.py ({error}); use the "
            "task.py that it was trained with"
        ) from None
    inputs, _ = task.prepare(batch)
    return inputs


def predict_file(predict: Callable, file: Path) -> list[tuple[str, float]]:
    """Return what `predict` finds in a file. Raises UserError if the model can't compute it."""
    try:
        return predict(file)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # such as for another number of channels
        raise UserError(
            f"{file}: the model can't compute what Predictor in task.py makes of it; adapt that to "
            f"the model ({shorten(str(error), 160)})"
        ) from None


@torch.no_grad()
def main() -> None:
    """Print the predictions for each image; continue after a broken one, with exit status 1."""
    args = parse_args()
    has_gpu = torch.cuda.is_available()
    if args.device == "cuda" and not has_gpu:
        raise UserError("--device cuda: there is no GPU here; leave it out")
    args.images = [*dict.fromkeys(find_images(args.images))]
    model, metadata = load_model(args.checkpoint)
    if args.export:
        sample = partial(sample_inputs, metadata["model_options"])
        print(export_model(model, args.export, sample))
        return
    model = model.to("cuda" if has_gpu and args.device != "cpu" else "cpu")
    predict = task.Predictor(model, metadata, args)
    nans = NanCounter(next(model.parameters()).device)

    def refuse_nan(*forward: Any) -> None:  # before anything is written
        nans.update(forward[-1])
        if nans.compute():
            nans.count.zero_()
            raise UserError(f"{file}: the model's output holds nan")

    model.register_forward_hook(refuse_nan)
    status = 0
    for file in args.images:
        try:
            found = predict_file(predict, file)
            refuse_nan(torch.tensor([value for _, value in found], device=nans.count.device))
        except OutageError:  # a UserError, too; reading the other files would take seconds for each
            raise
        except UserError as error:
            print(f"error: {one_message(error)}", file=sys.stderr)
            status = 1
            continue
        if args.json:
            line = json_line({"file": str(file), "found": found})
        else:
            names = ", ".join(f"{name} {value:.3f}" for name, value in found)
            line = printable(f"{file}: {names}")
        print(line, flush=True)  # at once, so that a full disk is an error here
    sys.exit(status)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # exit silently when piped into "head"
    distributed.run(main)
