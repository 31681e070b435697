"""Export of trained models to files that run without this project."""

import io
import os
import tempfile
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from apex_native.amp.casting import nested_tensors
from engine import UserError, move, prepare_tracing

FORMATS = (".onnx", ".pt2")
TOLERANCE, ROUNDING = 1e-3, 1e-6  # relative to the largest number of an output, and of all


def export_model(model: nn.Module, path: Path, sample_inputs: Callable[[int], Any]) -> str:
    """Write `model` to `path`: as ONNX (.onnx), or as a program of torch.export (.pt2).

    Sizes of the inputs stay variable where the model allows it. The file is compared with the
    model on inputs of another batch size; it replaces one at `path` only if its outputs are right.
    ONNX keeps weights of 2 GB and more in a second file, of the same name with .data after it.

    Args:
        model: in eval mode, on the CPU.
        sample_inputs: returns inputs of the given batch size: a tensor, or nested lists, tuples
            and dicts of them.

    Returns a description of the file, with the largest difference of its outputs.

    Raises UserError if the format is unknown, ONNX's packages are missing, the outputs differ, or
    the file cannot be written.
    """
    if path.suffix not in FORMATS:
        raise UserError(f"--export {path}: choose a file name that ends in {' or '.join(FORMATS)}")
    if path.suffix == ".onnx":
        _require_onnx(path)
    prepare_tracing()
    try:
        with TemporaryDirectory(dir=path.parent) as folder:
            written = Path(folder, path.name)
            difference = _export_and_compare(model, written, path, sample_inputs)
            # The .data before the file that names it.
            for file in sorted(written.parent.iterdir(), reverse=True):
                move(file, path.with_name(file.name))
        return f"{path}: {difference}"
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"--export {path} can't be written ({reason}): name another file") from None


def _export_and_compare(
    model: nn.Module, written: Path, path: Path, sample_inputs: Callable[[int], Any]
) -> str:
    """Write the file that will be at `path`; return how its outputs differ from the model's."""
    # Copies: the program would accept nothing but views, if these are views of batches.
    inputs, other_inputs = (_map(Tensor.clone, sample_inputs(size)) for size in (2, 3))
    automatic = torch.export.Dim.AUTO
    sizes = (_map(lambda tensor: dict.fromkeys(range(tensor.dim()), automatic), inputs),)
    export = _export_onnx if path.suffix == ".onnx" else _export_program
    run = export(model, inputs, sizes, written)
    expected = list(nested_tensors(model(other_inputs)))
    found = run(other_inputs)
    pairs = [
        ((one - other).abs().max().item(), other.abs().max().item())
        for one, other in zip(found, expected, strict=True)
    ]
    rounding = ROUNDING * max(largest for _, largest in pairs)  # of an output that should be zero
    for difference, largest in pairs:
        if not difference <= max(TOLERANCE * largest, rounding):  # NaN too
            raise UserError(
                f"--export {path}: its outputs differ from the model's by up to {difference:.2g}, "
                f"where the largest is {largest:.2g}; nothing was written"
            )
    difference, largest = max(pairs)
    return f"outputs as the model's, up to {difference:.1g} of {largest:.2g}"


def _export_program(
    model: nn.Module, inputs: Any, sizes: tuple, path: Path
) -> Callable[[Any], list[Tensor]]:
    """Write an exported program; return a function that runs the file."""
    program = torch.export.export(model, (inputs,), dynamic_shapes=sizes)
    content = io.BytesIO()
    torch.export.save(program, content)
    path.write_bytes(content.getbuffer())
    with path.open("rb") as file:
        loaded = torch.export.load(file).module()
    return lambda inputs: list(nested_tensors(loaded(inputs)))


def _export_onnx(
    model: nn.Module, inputs: Any, sizes: tuple, path: Path
) -> Callable[[Any], list[Tensor]]:
    """Write an ONNX model; return a function that runs the file."""
    onnxruntime = _import_onnxruntime()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the exporter's own internals
        program = torch.onnx.export(
            model, (inputs,), dynamo=True, dynamic_shapes=sizes, verbose=False
        )
    assert program is not None  # with dynamo=True
    program.save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def run(inputs: Any) -> list[Tensor]:
        arrays = [tensor.numpy() for tensor in nested_tensors(inputs)]
        outputs = session.run(None, dict(zip(names, arrays, strict=True)))
        return [torch.from_numpy(output) for output in outputs]

    return run


def _import_onnxruntime() -> ModuleType:
    """Import it with TMPDIR of its own: it writes to a file there, whoever has made that."""
    with TemporaryDirectory() as own:
        os.environ["TMPDIR"] = own
        try:
            import onnxruntime
        finally:
            os.environ["TMPDIR"] = tempfile.gettempdir()  # as before
    return onnxruntime


def _require_onnx(path: Path) -> None:
    if missing := [name for name in ("onnxscript", "onnxruntime") if not find_spec(name)]:
        raise UserError(f"--export {path} needs {' and '.join(missing)}: pip install -e .[onnx]")


def _map(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return `value` with the result of `function` in place of each tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _map(function, entry) for key, entry in value.items()}
    return type(value)(_map(function, entry) for entry in value)
