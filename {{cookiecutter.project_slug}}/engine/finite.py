"""Ends a run whose numbers have gone bad, with the place where they first do."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from engine.checkpoint import unwrap
from engine.report import Log
from engine.training import evaluation

PATIENCE = 10  # losses in a row
LOWEST_SCALE = 2.0**-16  # 32 overflows below where a dynamic scale starts


def demand(log: Log | None, model: nn.Module, inputs: Tensor | Mapping[str, Tensor]) -> None:
    """Raises FloatingPointError if training can't recover.

    Args:
        log: the numbers that say so; None says nothing.
        model, inputs: one step's, to find out where the first such number comes from; if the parts
            of the model have inputs of their own, those by the parts' names.
    """
    if log and log.bad >= PATIENCE:
        cause = f"{log.bad:.0f} losses in a row, up to step {log.step}, are not finite"
    elif log and log.loss_scale < LOWEST_SCALE:
        cause = f"the loss scale is down to {log.loss_scale:g}: no scale keeps the gradients finite"
    else:
        return
    raise FloatingPointError(
        f"{cause}. {first_bad_layer(unwrap(model), inputs)}. Go on from an earlier checkpoint "
        "with a lower --lr, or look at the data; none that holds nan was written"
    )


@torch.no_grad()
def first_bad_layer(model: nn.Module, inputs: Tensor | Mapping[str, Tensor]) -> str:
    """Where a forward pass first meets a number that is not finite, in words."""
    by_part = inputs if isinstance(inputs, Mapping) else {"": inputs}
    if not all(map(_is_finite, by_part.values())):
        return "What goes into the model is not finite"
    found: list[str] = []

    def look(name: str, module: nn.Module, inputs: tuple, output: object) -> None:
        if found:
            return
        for kind, own in (("weights", module.parameters), ("statistics", module.buffers)):
            if not all(_is_finite(tensor) for tensor in own(recurse=False)):
                found.append(f"The first layer that is not finite is {name}, in its {kind}")
                return
        if not _is_finite(output):
            found.append(f"The first layer whose output is not finite is {name}")

    hooks = [
        module.register_forward_hook(lambda *seen, name=name: look(name, *seen))
        for name, module in model.named_modules()
        if name
    ]
    try:
        with evaluation(model):  # in which no layer waits for other processes
            for part, its_input in by_part.items():
                model.get_submodule(part)(its_input)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else "Every layer's output is finite, the loss is not"


def _is_finite(value: object) -> bool:
    is_number = isinstance(value, Tensor) and value.is_floating_point()
    return not is_number or bool(value.isfinite().all())
