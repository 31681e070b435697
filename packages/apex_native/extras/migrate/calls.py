"""Rules for calls that have one equivalent in torch: DDP, SyncBN, optimizers and norms.

Each takes the call and returns the new call, or raises NoEquivalentError.
"""

from collections.abc import Callable

import libcst as cst

from ..covered import COVERED

Rule = Callable[[cst.Call], cst.Call]
UNPACKED = "its arguments are unpacked from a variable"
OF_NORMS = "normalized_shape eps elementwise_affine"  # arguments of Apex's norms and of torch's


class NoEquivalentError(Exception):
    """A call that torch has no equivalent of; the message is the reason."""


def _to(
    call: cst.Call, name: str, positional: list[cst.Arg], keywords: dict[str, cst.Arg]
) -> cst.Call:
    args = [*positional, *keywords.values()]
    if args:
        comma = call.args[-1].comma if call.args else cst.MaybeSentinel.DEFAULT
        args[-1] = args[-1].with_changes(comma=comma)
        args[:-1] = [
            arg if isinstance(arg.comma, cst.Comma) else arg.with_changes(comma=_comma())
            for arg in args[:-1]
        ]
    return call.with_changes(func=cst.parse_expression(name), args=args)


class _Floats(cst.CSTTransformer):
    """Replacement of decimal integers by floats, except for indices."""

    def visit_Subscript(self, node: cst.Subscript) -> bool:
        return False

    def leave_Integer(
        self, original_node: cst.Integer, updated_node: cst.Integer
    ) -> cst.BaseExpression:
        value = original_node.value
        return cst.Float(f"{value}.0") if value.isdigit() else updated_node


def _comma() -> cst.Comma:
    return cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))


def _keyword(name: str, value: str) -> cst.Arg:
    equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    return cst.Arg(cst.parse_expression(value), keyword=cst.Name(name), equal=equal)


def is_unpacked(call: cst.Call) -> bool:
    """Return whether arguments of `call` are unpacked from a variable."""
    return any(arg.star for arg in call.args)


def split(call: cst.Call) -> tuple[list[cst.Arg], dict[str, cst.Arg]]:
    """Return positional and keyword arguments of `call`."""
    positional = [arg for arg in call.args if arg.keyword is None]
    return positional, {arg.keyword.value: arg for arg in call.args if arg.keyword is not None}


def models_and_optimizers(call: cst.Call) -> list[cst.BaseExpression]:
    """Return what ``amp.initialize`` is given to prepare, by position or by keyword."""
    positional, keywords = split(call)
    given = [arg.value for arg in positional if not arg.star]
    names = ("models", "optimizers")[len(given) :]
    return given + [keywords[name].value for name in names if name in keywords]


def literal(arg: cst.Arg | None, default: str) -> str | None:
    """Return the source of an argument that is a name or a string; None for anything else."""
    if arg is None:
        return default
    if isinstance(arg.value, (cst.Name, cst.SimpleString)):
        return str(arg.value.value)
    return None


def _check(
    call: cst.Call, most: int, kept: str, dropped: dict[str, str]
) -> tuple[list[cst.Arg], dict[str, cst.Arg]]:
    """Return the arguments without those of `dropped`, where they have the values given there.

    "" stands for any value. Raises NoEquivalentError for other arguments.
    """
    if is_unpacked(call):
        raise NoEquivalentError(UNPACKED)
    positional, keywords = split(call)
    if len(positional) > most:
        raise NoEquivalentError(f"more than {most} positional arguments")
    for name in [name for name in keywords if name not in kept.split()]:
        value = literal(keywords[name], "")
        if name not in dropped or dropped[name] not in ("", value):
            raise NoEquivalentError(f"torch has no equivalent of its argument {name}")
        del keywords[name]
    return positional, keywords


def fused_adam(call: cst.Call) -> cst.Call:
    """Convert FusedAdam to a fused AdamW or Adam; state the weight decay: the defaults differ."""
    mode = literal(split(call)[1].get("adam_w_mode"), "True")
    dropped = {"adam_w_mode": "", "bias_correction": "True", "set_grad_none": "True"}
    dropped["amsgrad"] = "False"
    positional, keywords = _check(call, 2, "params lr betas eps weight_decay", dropped)
    if mode not in ("True", "False"):
        raise NoEquivalentError("its adam_w_mode is a variable")
    keywords.setdefault("weight_decay", _keyword("weight_decay", "0.0"))
    if "betas" in keywords:  # torch requires floats, also 0.0
        betas = keywords["betas"].value.visit(_Floats())
        keywords["betas"] = keywords["betas"].with_changes(value=betas)
    keywords["fused"] = _keyword("fused", "True")
    name = "AdamW" if mode == "True" else "Adam"
    return _to(call, f"torch.optim.{name}", positional, keywords)


def fused_sgd(call: cst.Call) -> cst.Call:
    """Convert FusedSGD to SGD."""
    dropped = {"set_grad_none": "", "materialize_master_grads": "", "wd_after_momentum": "False"}
    kept = "params lr momentum dampening weight_decay nesterov"
    return _to(call, "torch.optim.SGD", *_check(call, 6, kept, dropped))


def layer_norm(call: cst.Call) -> cst.Call:
    """Convert FusedLayerNorm to LayerNorm."""
    return _to(call, "torch.nn.LayerNorm", *_check(call, 3, OF_NORMS, {"memory_efficient": ""}))


def rms_norm(call: cst.Call) -> cst.Call:
    """Convert FusedRMSNorm to RMSNorm; state eps: the defaults differ."""
    positional, keywords = _check(call, 3, OF_NORMS, {"memory_efficient": ""})
    if len(positional) < 2:
        keywords.setdefault("eps", _keyword("eps", "1e-5"))
    return _to(call, "torch.nn.RMSNorm", positional, keywords)


def distributed(call: cst.Call) -> cst.Call:
    """Convert Apex's DistributedDataParallel to torch's, without its broadcasts of buffers."""
    delay = literal(split(call)[1].get("delay_allreduce"), "False")
    dropped = {"delay_allreduce": "", "message_size": ""}
    positional, keywords = _check(call, 1, "module", dropped)
    if delay not in ("True", "False"):
        raise NoEquivalentError("its delay_allreduce is a variable")
    keywords["broadcast_buffers"] = _keyword("broadcast_buffers", "False")
    if delay == "True":
        keywords["find_unused_parameters"] = _keyword("find_unused_parameters", "True")
    return _to(call, "torch.nn.parallel.DistributedDataParallel", positional, keywords)


def sync_batch_norm(call: cst.Call) -> cst.Call:
    """Convert convert_syncbn_model to SyncBatchNorm.convert_sync_batchnorm."""
    name = "torch.nn.SyncBatchNorm.convert_sync_batchnorm"
    return _to(call, name, *_check(call, 2, "module process_group", {"channel_last": ""}))


# Notes in the report on calls that are converted.
OF_THEIR_TYPE = "have the type of the parameters: keep Apex's class if another file makes them half"
NOTES = {
    "apex.optimizers.FusedAdam": "param_groups have no step, which some schedulers read; the "
    f"moments {OF_THEIR_TYPE}",
    "apex.optimizers.FusedSGD": "zero_grad() drops the gradients, where FusedSGD's zeroes them: "
    f"parameters that a step does not use keep their values; momentum buffers {OF_THEIR_TYPE}",
}
RULES: dict[str, Rule] = {
    "apex.normalization.FusedLayerNorm": layer_norm,
    "apex.normalization.FusedRMSNorm": rms_norm,
    "apex.normalization.fused_layer_norm.FusedLayerNorm": layer_norm,
    "apex.normalization.fused_layer_norm.FusedRMSNorm": rms_norm,
    "apex.optimizers.FusedAdam": fused_adam,
    "apex.optimizers.FusedSGD": fused_sgd,
    "apex.parallel.DistributedDataParallel": distributed,
    "apex.parallel.convert_syncbn_model": sync_batch_norm,
}
# What torch has in the place of other names of Apex, whose arguments or defaults differ.
SIMILAR = {
    "FastLayerNorm": "torch.nn.LayerNorm",
    "FusedAdagrad": "torch.optim.Adagrad",
    "GroupNorm": "torch.nn.GroupNorm",
    "MixedFusedLayerNorm": "torch.nn.LayerNorm",
    "MixedFusedRMSNorm": "torch.nn.RMSNorm",
    "SoftmaxCrossEntropyLoss": "torch.nn.functional.cross_entropy",
    "SyncBatchNorm": "torch.nn.SyncBatchNorm",
    "clip_grad_norm": "torch.nn.utils.clip_grad_norm_",
    "clip_grad_norm_": "torch.nn.utils.clip_grad_norm_",
    "fused_layer_norm_affine": "torch.nn.functional.layer_norm",
    "fused_rms_norm_affine": "torch.nn.functional.rms_norm",
}


def unconverted(name: str) -> str:
    """Return why a call of a name of Apex that is not in RULES stays."""
    parts, short = name.split("."), name.removeprefix("apex.")
    for part in parts[-2:]:  # the name, or the class of a method
        if part in SIMILAR:
            return f"migrate does not convert {short}; use {SIMILAR[part]}, or apex_native's"
    for index, part in enumerate(parts):
        sources = COVERED.get(".".join(parts[:index]), {})
        if any(part in names.split() for names in sources.values()):
            return f"torch has no {short}; apex_native has it"
    return f"migrate does not convert {short}"
