"""Export of trained models to files that run without this project."""

import io
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten
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

    Sizes of the inputs stay variable where the model allows it, and no output for half or twice of
    them is wrong; else that of the batch alone. The file is compared with the model on inputs of
    another batch size; it replaces one at `path` only if its outputs are right.
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
    export = _export_onnx if path.suffix == ".onnx" else _export_program
    note = ""
    is_guarded = path.suffix == ".pt2"
    try:
        expected = model(other_inputs)
    except Exception as error:  # of any type
        raise UserError(
            f"--export {path}: the model does not take the inputs of dummy_batch in task.py "
            f"({shorten(str(error), 160)}): correct their size there"
        ) from None
    try:
        run = export(model, inputs, _variable_sizes(inputs), written)
        is_fixed = any(_is_wrong(model, run, is_guarded, resized) for resized in _resize(inputs))
    except Exception:  # of any type, such as for sizes that are rounded up
        is_fixed = True
    if is_fixed:
        # A model may compute otherwise for larger inputs, which ONNX does not record.
        run = export(model, inputs, _variable_sizes(inputs, batch_only=True), written)
        note = "; only for inputs of the size that it was exported with, in any number"
    is_right, difference, largest = _compare(run(other_inputs), expected)
    if not is_right:
        raise UserError(
            f"--export {path}: its outputs differ from the model's by up to {difference:.2g}, "
            f"where the largest is {largest:.2g}; nothing was written"
        )
    return f"outputs as the model's, up to {difference:.1g} of {largest:.2g}{note}"


def _variable_sizes(inputs: Any, batch_only: bool = False) -> tuple:
    """Return the argument `dynamic_shapes` of torch's exporters."""

    def sizes(tensor: Tensor) -> dict[int, Any]:
        dims = range(min(1, tensor.dim()) if batch_only else tensor.dim())
        return dict.fromkeys(dims, torch.export.Dim.AUTO)

    return (_map(sizes, inputs),)


def _resize(inputs: Any) -> Iterator[Any]:
    """Yield `inputs` with half and twice the sizes of all tensors, and of each, if there are more.

    The sizes of batch and channels stay.
    """
    tensors = list(nested_tensors(inputs))
    for chosen in (tensors, *([one] for one in tensors if len(tensors) > 1)):
        for is_twice in (False, True):
            yield _map(partial(_resize_one, chosen, is_twice), inputs)


def _resize_one(chosen: Sequence[Tensor], is_twice: bool, tensor: Tensor) -> Tensor:
    if not any(tensor is one for one in chosen):
        return tensor
    for dim in range(1 if tensor.dim() == 2 else 2, tensor.dim()):
        half = tensor.narrow(dim, 0, -(-tensor.size(dim) // 2))
        tensor = torch.cat([tensor, tensor], dim) if is_twice else half
    return tensor.contiguous()


def _is_wrong(
    model: nn.Module, run: Callable[[Any], list[Tensor]], is_guarded: bool, inputs: Any
) -> bool:
    """Return whether the file that `run` runs has other outputs than the model.

    Args:
        is_guarded: the file states for which sizes it is made, and may refuse others.
    """
    try:
        expected = model(inputs)
    except Exception:  # it does not have to take all sizes, and may raise anything
        return False
    try:
        return not _compare(run(inputs), expected)[0]
    except Exception:  # of torch's guards, or of some operation in onnxruntime
        return not is_guarded


def _compare(found: list[Tensor], expected: Any) -> tuple[bool, float, float]:
    """Return whether all outputs are right, and the difference and largest number of one.

    It is the first that is not right, or else the one that differs most.
    """
    tensors = map(_widen, found), map(_widen, nested_tensors(expected))
    pairs = [
        (_largest(torch.where(one == other, 0.0, one - other)), _largest(other[other.isfinite()]))
        for one, other in zip(*tensors, strict=True)
    ]
    rounding = ROUNDING * max(largest for _, largest in pairs)  # of an output that should be zero
    wrong = [pair for pair in pairs if not pair[0] <= max(TOLERANCE * pair[1], rounding)]  # NaN too
    return not wrong, *(wrong[0] if wrong else max(pairs))


def _widen(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float64))


def _largest(values: Tensor) -> float:
    return values.abs().max().item() if values.numel() else 0.0


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
