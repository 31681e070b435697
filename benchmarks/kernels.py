"""Times of Apex's layers, losses and optimizers: apex_native, torch's own, and real Apex's kernels.

    python benchmarks/kernels.py

Needs a GPU; real Apex takes part with those of its extensions that are installed. A layer or loss
is timed forward and backward, an optimizer with a step. The implementations take turns; the table
has the medians in ms, and the speed of apex_native relative to the others. "torch" is what its
documentation offers for the same result: the function or fused optimizer where there is one, else
the formula compiled with torch.compile.
"""

import argparse
import csv
import importlib
import sys
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from flags import file_name, whole_number
from torch import Tensor, nn
from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
TEMPLATE = HERE.parent / "{{cookiecutter.project_slug}}"
TESTS = HERE.parent / "tests"
sys.path[:0] = [str(folder) for folder in (TEMPLATE, TESTS, TESTS / "package")]
sys.dont_write_bytecode = True
from extras_path import find_in_native  # noqa: E402

NORMS = "apex.normalization.fused_layer_norm"
SOFTMAX = "apex.transformer.functional.fused_softmax"
AHEAD = 40  # products of matrices, each more than a millisecond
Find = Callable[[str, str], Any]
Act = Callable[[], object]


def find_in_apex(module: str, name: str) -> Any:
    """Return a name of real Apex. Raises ImportError if an extension is missing."""
    return getattr(importlib.import_module(module), name)


def pass_through(function: Callable[[], Tensor], inputs: list[Tensor]) -> Act:
    """Return a forward and a backward pass."""
    grad = torch.randn_like(function())
    return lambda: torch.autograd.grad(function(), inputs, grad)


def leaves(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, device="cuda", dtype=dtype).requires_grad_() for shape in shapes]


def layer_norm(find: Find | None, dtype: torch.dtype) -> Act:
    x, *affine = leaves(dtype, (65536, 1024), (1024,), (1024,))
    if find is None:
        return pass_through(lambda: F.layer_norm(x, (1024,), *affine), [x, *affine])
    function = find(NORMS, "fused_layer_norm_affine")
    return pass_through(lambda: function(x, *affine, (1024,)), [x, *affine])


def rms_norm(find: Find | None, dtype: torch.dtype) -> Act:
    x, weight = leaves(dtype, (65536, 1024), (1024,))
    if find is None:
        return pass_through(lambda: F.rms_norm(x, (1024,), weight, 1e-6), [x, weight])
    function = find(NORMS, "fused_rms_norm_affine")
    return pass_through(lambda: function(x, weight, (1024,)), [x, weight])


def fast_layer_norm(find: Find | None, dtype: torch.dtype) -> Act:
    if find is None:
        return layer_norm(None, dtype)
    (x,) = leaves(dtype, (65536, 1024))
    layer = find("apex.contrib.layer_norm", "FastLayerNorm")(1024).cuda().to(dtype)
    return pass_through(lambda: layer(x), [x, *layer.parameters()])


def group_norm_silu(find: Find | None, dtype: torch.dtype) -> Act:
    x, *affine = leaves(dtype, (16, 512, 64, 64), (512,), (512,))
    x = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    if find is None:

        def formula() -> Tensor:
            y = F.silu(F.group_norm(x, 32, *affine))
            return y.contiguous(memory_format=torch.channels_last)  # as Apex's

        return pass_through(torch.compile(formula), [x, *affine])
    kind = find("apex.contrib.group_norm", "GroupNorm")
    layer = kind(32, 512, device="cuda", dtype=dtype, act="silu")
    return pass_through(lambda: layer(x), [x, *layer.parameters()])


def cross_entropy(find: Find | None, dtype: torch.dtype) -> Act:
    (logits,) = leaves(dtype, (8192, 30528))
    labels = torch.randint(1, 30528, (8192,), device="cuda")
    if find is None:
        options = {"label_smoothing": 0.1, "reduction": "none", "ignore_index": 0}
        return pass_through(lambda: F.cross_entropy(logits.float(), labels, **options), [logits])
    loss = find("apex.contrib.xentropy", "SoftmaxCrossEntropyLoss").apply
    return pass_through(lambda: loss(logits, labels, 0.1, 0, True), [logits])


def masked_softmax(find: Find | None, dtype: torch.dtype) -> Act:
    (scores,) = leaves(dtype, (8, 16, 1024, 1024))
    mask = torch.rand(8, 1, 1024, 1024, device="cuda") < 0.3
    if find is None:

        def formula(scores: Tensor) -> Tensor:
            probabilities = (scores.float() * 0.125).masked_fill(mask, -1e4).softmax(-1)
            return probabilities.masked_fill(mask.all(-1, keepdim=True), 0.0).to(dtype)

        compiled = torch.compile(formula)
        return pass_through(lambda: compiled(scores), [scores])
    function = find(SOFTMAX, "scaled_masked_softmax")
    return pass_through(lambda: function(scores, mask, 0.125), [scores])


def causal_softmax(find: Find | None, dtype: torch.dtype) -> Act:
    (scores,) = leaves(dtype, (8, 16, 1024, 1024))
    if find is None:

        def formula(scores: Tensor) -> Tensor:
            later = torch.ones(1024, 1024, dtype=torch.bool, device="cuda").triu(1)
            wide = (scores.float() * 0.125).masked_fill(later, float("-inf"))
            return wide.softmax(-1).to(dtype)

        compiled = torch.compile(formula)
        return pass_through(lambda: compiled(scores), [scores])
    function = find(SOFTMAX, "scaled_upper_triang_masked_softmax")
    return pass_through(lambda: function(scores, None, 0.125), [scores])


def optimizer_step(
    name: str, of_torch: Callable[..., torch.optim.Optimizer] | None, **options: float
) -> Callable[[Find | None, torch.dtype], Act]:
    """Return the case of an optimizer, on the 110 million parameters of a BERT."""

    def case(find: Find | None, dtype: torch.dtype) -> Act:
        if find is None and of_torch is None:
            raise ImportError("torch has none")
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(768, 12, 3072, device="cuda", dtype=dtype)
        model = nn.ModuleList([nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)])
        model.append(nn.Embedding(30522, 768, device="cuda", dtype=dtype))
        parameters = list(model.parameters())
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        kind = of_torch if find is None else find("apex.optimizers", name)
        return kind(parameters, lr=1e-4, **options).step

    return case


HALF = (torch.float16, torch.bfloat16)
FLOAT = (torch.float32,)
ADAMW, SGD = (partial(kind, fused=True) for kind in (torch.optim.AdamW, torch.optim.SGD))
ADAGRAD = partial(torch.optim.Adagrad, foreach=True)  # its fused kernel is for the CPU
CASES: dict[str, tuple[Callable[[Find | None, torch.dtype], Act], tuple[torch.dtype, ...]]] = {
    "layer norm, 65536 × 1024": (layer_norm, (*FLOAT, *HALF)),
    "RMS norm, 65536 × 1024": (rms_norm, (*FLOAT, *HALF)),
    "FastLayerNorm, 65536 × 1024": (fast_layer_norm, (*FLOAT, *HALF)),
    "group norm and SiLU, 16 × 512 × 64²": (group_norm_silu, (*FLOAT, *HALF)),
    "cross entropy, 8192 × 30528": (cross_entropy, HALF),
    "masked softmax, 128 × 1024²": (masked_softmax, HALF),
    "causal softmax, 128 × 1024²": (causal_softmax, HALF),
    "FusedAdam, BERT": (optimizer_step("FusedAdam", ADAMW, weight_decay=0.01), FLOAT),
    "FusedSGD, BERT": (optimizer_step("FusedSGD", SGD, momentum=0.9), FLOAT),
    "FusedAdagrad, BERT": (optimizer_step("FusedAdagrad", ADAGRAD), FLOAT),
    "FusedLAMB, BERT": (optimizer_step("FusedLAMB", None, weight_decay=0.01), FLOAT),
    "FusedNovoGrad, BERT": (optimizer_step("FusedNovoGrad", None, weight_decay=0.01), FLOAT),
}
FINDERS: dict[str, Find | None] = {
    "apex_native": find_in_native,
    "torch": None,
    "apex": find_in_apex,
}


def milliseconds(act: Act, repeats: int) -> float:
    """Return the time of a call on the GPU, on average of `repeats` in a row.

    The calls are queued behind other work, so that the pace of the CPU does not count.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    factor = torch.zeros(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(AHEAD):
        torch.mm(factor, factor)
    start.record()
    for _ in range(repeats):
        act()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


def measure(case: Callable[[Find | None, torch.dtype], Act], dtype: torch.dtype, rounds: int):
    """Return the median time of each implementation that is there, which take turns."""
    acts: dict[str, Act] = {}
    for name, find in FINDERS.items():
        try:
            acts[name] = case(find, dtype)
        except (ImportError, RuntimeError) as error:  # of Apex: the type is not supported
            print(f"without {name}: {error}", file=sys.stderr)
    for act in acts.values():
        milliseconds(act, 5)
    times: dict[str, list[float]] = {name: [] for name in acts}
    for _ in range(rounds):
        for name, act in acts.items():
            times[name].append(milliseconds(act, 20))
    return {name: median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=whole_number, default=7, help="turns of each")
    parser.add_argument("--output", type=file_name, default=HERE / "kernels.csv", metavar="FILE")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("needs a GPU")
    print(f"{date.today()}, {torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    print("| | type | apex_native ms | torch ms | Apex ms | speed to torch | to Apex |")
    print("|---" * 7 + "|")
    with args.output.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("case", "type", *FINDERS))
        for name, (case, types) in CASES.items():
            for dtype in types:
                times = measure(case, dtype, args.rounds)
                torch.cuda.empty_cache()
                short = str(dtype).removeprefix("torch.")
                writer.writerow((name, short, *(times.get(key, "") for key in FINDERS)))
                file.flush()
                own = times["apex_native"]
                shown = [f"{times[key]:.3f}" if key in times else "–" for key in FINDERS]
                others = ("torch", "apex")
                ratios = [f"{times[key] / own:.2f}" if key in times else "–" for key in others]
                print(f"| {name} | {short} | {' | '.join([*shown, *ratios])} |", flush=True)


if __name__ == "__main__":
    main()
