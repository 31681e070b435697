"""The optimization levels, and the rules for overriding what they set."""

import math
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Properties:
    """What an opt_level means. The names are Apex's keyword arguments.

    cast_model_type: what weights and inputs are cast to, or None.
    patch_torch_functions: whether functions are cast one by one, to `function_type`.
    keep_batchnorm_fp32, master_weights: for cast models; None where they have no meaning.
    loss_scale: "dynamic" or a number.
    """

    opt_level: str
    cast_model_type: torch.dtype | None = None
    patch_torch_functions: bool = False
    function_type: torch.dtype = torch.float16
    keep_batchnorm_fp32: bool | None = None
    master_weights: bool | None = None
    loss_scale: float | str = 1.0
    enabled: bool = True


_HALF, _BFLOAT16 = torch.float16, torch.bfloat16

OPT_LEVELS = {
    level.opt_level: level
    for level in (
        Properties("O0", cast_model_type=torch.float32, master_weights=False),
        Properties("O1", patch_torch_functions=True, loss_scale="dynamic"),
        Properties(
            "O2", _HALF, keep_batchnorm_fp32=True, master_weights=True, loss_scale="dynamic"
        ),
        Properties("O3", _HALF, keep_batchnorm_fp32=False, master_weights=False),
        # The next two are of ROCm's fork: O1 and O2 in bfloat16, which needs no loss scaling.
        Properties("O4", patch_torch_functions=True, function_type=_BFLOAT16),
        Properties("O5", _BFLOAT16, keep_batchnorm_fp32=True, master_weights=True),
    )
}


def properties_for(opt_level: str, **overrides: object) -> Properties:
    """The properties of `opt_level`, with every override that is not None applied.

    Raises RuntimeError for an unknown level and for overrides that contradict the level.
    """
    if opt_level not in OPT_LEVELS:
        raise RuntimeError(
            f"Unexpected optimization level {opt_level!r}: use one of {', '.join(OPT_LEVELS)} "
            "(the letter O, then a digit)."
        )
    level = OPT_LEVELS[opt_level]
    given = {name: value for name, value in overrides.items() if value is not None}

    if level.patch_torch_functions:
        if given.get("cast_model_type") in (False, torch.float32):
            del given["cast_model_type"]
        for name in ("cast_model_type", "keep_batchnorm_fp32", "master_weights"):
            if name in given:
                raise RuntimeError(
                    f"{name} has no meaning at {opt_level}, which casts functions and leaves the "
                    f"weights in fp32: leave {name} out, or use a level that casts the model."
                )
    elif given.get("patch_torch_functions"):
        raise RuntimeError("patch_torch_functions=True goes with opt_level O1 or O4 only.")

    if given.get("cast_model_type") is False:
        given["cast_model_type"] = None
    return replace(level, **_parsed(given))


def _parsed(given: dict) -> dict:
    """`given` with the spellings that command lines bring ("False", "128.0") as values."""
    if "keep_batchnorm_fp32" in given:
        value = given["keep_batchnorm_fp32"]
        if value not in (True, False, "True", "False"):
            raise RuntimeError(
                f"keep_batchnorm_fp32 must be True, False, 'True' or 'False', not {value!r}."
            )
        given["keep_batchnorm_fp32"] = value in (True, "True")
    if given.get("loss_scale", "dynamic") != "dynamic":
        try:
            value = float(given["loss_scale"])
        except (TypeError, ValueError):
            value = math.nan
        if not 0 < value < math.inf:
            raise RuntimeError(
                f"loss_scale must be 'dynamic' or a number above 0, not {given['loss_scale']!r}."
            )
        given["loss_scale"] = value
    return given
