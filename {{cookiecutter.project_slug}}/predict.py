"""Show what a trained model makes of image files.

python predict.py runs/NAME/best.pt cat.jpg dog.png    a line for each
python predict.py runs/NAME/best.pt FOLDER --json      for all images in a folder
"""

import json
import signal
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torchvision.datasets.folder import is_image_file

import task
from engine import checkpoint, cli, distributed
from engine.errors import UserError


def parse_args() -> Namespace:
    parser = cli.ArgumentParser(description="Show what a trained model makes of image files.")
    add = parser.add_argument
    add("checkpoint", type=Path, help="last.pt, or another; with --ema, its average predicts")
    add("images", type=Path, nargs="+", metavar="FILE|FOLDER", help="folders with all they hold")
    # % if task == "segmentation"
    add("--output", type=Path, default=Path("predictions"), help="a new folder, for the masks")
    # % else
    add("--top", type=cli.count, default=5, metavar="N", help="show so many, the likeliest")
    # % endif
    # % if task == "contrastive"
    add("--captions", type=Path, help="to choose from, one in each line (default: validation's)")
    # % endif
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU, if any")
    add("--json", action="store_true", help="lines for a program to read")
    return parser.parse_args()


def find(paths: list[Path]) -> Iterator[Path]:
    """The files among `paths`, and the images in the folders among them."""
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: there is no such file or folder")
        inside = sorted(path.rglob("*")) if path.is_dir() else []
        images = [file for file in inside if file.is_file() and is_image_file(file.name)]
        if path.is_dir() and not images:
            raise UserError(f"{path} holds no images, such as NAME.jpg or NAME.png")
        yield from images or [path]


def load(path: Path) -> tuple[nn.Module, dict]:
    """The trained model, in fp32 on the CPU, and what its checkpoint says of it."""
    state = checkpoint.load(path)
    about = state.get("about")
    if not isinstance(about, dict) or not {"metric", "arch", "data"} <= about.keys():
        raise UserError(
            f"{path}: it does not say of which model and classes it is; go on with it for an epoch "
            f"(./run.sh --resume {path} --epochs N), and use the checkpoint which that saves"
        )
    if about["metric"] != task.METRIC:
        raise UserError(
            f"{path}: it is of another task, with {about['metric']} where this one has "
            f"{task.METRIC}; use predict.py of the project that made it"
        )
    try:
        # % if task == "contrastive"
        model = task.build_model(about["arch"])
        # % else
        model = task.build_model(about["arch"], len(about.get("classes", ())))
        # % endif
        model.load_state_dict(state.get("ema", state["model"]))
    except (RuntimeError, TypeError, AttributeError):
        raise UserError(
            f"{path}: its weights do not fit {about['arch']} as task.py builds it now; use the "
            "task.py that it was trained with"
        ) from None
    return model.eval(), about


@torch.inference_mode()
def main() -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # "| head" ends it
    args = parse_args()
    has_gpu = torch.cuda.is_available()
    if args.device == "cuda" and not has_gpu:
        raise UserError("--device cuda: there is no GPU here; leave it out")
    args.images = [*dict.fromkeys(find(args.images))]
    model, about = load(args.checkpoint)
    model = model.to("cuda" if has_gpu and args.device != "cpu" else "cpu")
    predict = task.Predictor(model, about, args)
    status = 0
    for file in args.images:
        try:
            found = predict(file)
        except UserError as error:  # such as a broken image; the others are not
            print(f"error: {error}", file=sys.stderr)
            status = 1
            continue
        if args.json:
            print(json.dumps({"file": str(file), "found": found}, ensure_ascii=False))
        else:
            print(f"{file}: {', '.join(f'{name} {share:.3f}' for name, share in found)}")
    sys.exit(status)


if __name__ == "__main__":
    distributed.run(main)
