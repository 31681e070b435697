"""Which of timm's models the template builds, converts to SyncBN, and trains.

    python benchmarks/timm_models.py [--only PATTERN]

Builds each registered model on the meta device by task.build_model, which needs no memory, and
converts it as main.py does; counts batch norms that were converted and those that were not. Then
trains one step of a model of each of six families on the CPU, before and after conversion.

Prints the models that cannot be built or keep other norms, with the reason, and the counts.
"""

import argparse
import contextlib
import copy
import io
import sys
from collections import Counter
from pathlib import Path

import timm
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

PROJECT = Path(__file__).resolve().parent.parent / "{{cookiecutter.project_slug}}"
sys.path.insert(0, str(PROJECT))
import task  # noqa: E402
from apex_native.parallel import SyncBatchNorm, convert_syncbn_model  # noqa: E402
from engine import UserError  # noqa: E402
from engine.models import convert_norms, model_options  # noqa: E402

FAMILIES = (
    "resnet18",
    "convnext_atto",
    "efficientnet_b0",
    "vit_tiny_patch16_224",
    "swin_tiny_patch4_window7_224",
    "regnetx_002",
)
SIZE, BATCH, CLASSES = 64, 4, 10


def build(name: str, image_size: int | None = None) -> nn.Module:
    """Return a model as main.py makes it of --arch timm:NAME, without the log."""
    arch = f"timm:{name}"
    with contextlib.redirect_stderr(io.StringIO()):
        options = model_options(arch, {"size": image_size} if image_size else None)
        return task.build_model(arch, CLASSES, **options)


def convert(model: nn.Module) -> nn.Module:
    """Return the model with SyncBN as main.py makes it, without the log."""
    with contextlib.redirect_stdout(io.StringIO()):
        return convert_norms(model, convert_syncbn_model)


def check_conversion(name: str, counts: Counter[str]) -> str:
    """Build and convert a model on the meta device; return what went wrong, "" if nothing did."""
    try:
        with torch.device("meta"):
            model = build(name)
    except UserError as error:
        counts["not built"] += 1
        return str(error)
    counts["built"] += 1
    norms = [part for part in model.modules() if isinstance(part, _BatchNorm)]
    fused = [norm for norm in norms if hasattr(norm, "act")]
    counts["with batch norms"] += bool(norms)
    counts["with norms that end in an activation"] += bool(fused)
    names = list(model.state_dict())
    model = convert(model)
    found = [part for part in model.modules() if isinstance(part, _BatchNorm)]
    others = {type(part).__name__ for part in found if not isinstance(part, SyncBatchNorm)}
    counts["norms"] += len(found)
    counts["norms that end in an activation"] += len(fused)
    counts["norms converted"] += sum(isinstance(part, SyncBatchNorm) for part in found)
    if others or len(found) != len(norms):
        return f"not converted: {', '.join(sorted(others)) or f'{len(found)} of {len(norms)}'}"
    if list(model.state_dict()) != names:
        return "the names in its state dict differ after the conversion"
    counts["converted"] += 1
    return ""


def check_step(name: str) -> str:
    """Train one step of a model, and of its converted copy; return the losses."""
    torch.manual_seed(0)
    plain = build(name, SIZE)
    converted = convert(copy.deepcopy(plain))
    images, labels = torch.randn(BATCH, 3, SIZE, SIZE), torch.arange(BATCH)
    losses: list[list[float]] = []
    for model in (plain, converted):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        torch.manual_seed(0)
        losses.append([])
        for _ in range(2):
            loss = task.criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    (before, after), other = losses
    equal = "the same" if other == losses[0] else f"{other[0]:.6f} → {other[1]:.6f}"
    return f"loss {before:.4f} → {after:.4f} after a step, with SyncBN {equal}"


def main() -> None:
    """Print the exceptions, the counts and the steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="PATTERN", help="such as 'resnet*'")
    args = parser.parse_args()
    names = timm.list_models(args.only)
    print(f"timm {timm.__version__}, torch {torch.__version__}, {len(names)} models")
    counts: Counter[str] = Counter()
    for name in names:
        problem = check_conversion(name, counts)
        if problem:
            print(f"{name}: {problem}", flush=True)
    for title, count in counts.items():
        print(f"{title}: {count}")
    for name in FAMILIES:
        print(f"{name}: {check_step(name)}", flush=True)


if __name__ == "__main__":
    main()
