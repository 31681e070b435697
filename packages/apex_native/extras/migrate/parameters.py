"""Parameters of optimizers: the models that they are of."""

import re

import libcst as cst

from .gradients import CLASS, Gradients
from .places import NONE, last_name, source

UNKNOWN = "?"  # in place of a model: parameters that may be of any
PARAMETERS_OF = re.compile(r"(.+)\.(?:named_)?parameters\(\)")
COLLECTING = ("filter", "list", "tuple", "chain", "iter")  # functions that return what they get


class Parameters(Gradients):
    """Search for the models of an optimizer, in the forms of tutorials; others are UNKNOWN."""

    def models_of(self, optimizer: str) -> set[str]:
        """Return the models whose parameters an optimizer has, or UNKNOWN."""
        values = self.values_of(optimizer)
        found = (self._models_in(value, (optimizer,)) for value in values)
        added = any(
            name == "add_param_group" and source(call.func).startswith(f"{optimizer}.")
            for name, call in self.calls
        )
        return set().union({UNKNOWN} if added or not values else (), *found)

    def _models_in(self, value: cst.BaseExpression, seen: tuple[str, ...]) -> set[str]:
        """Return the models whose parameters are in an expression, or UNKNOWN."""
        code = source(value)
        match = PARAMETERS_OF.fullmatch(code)
        if match:
            return {match[1].removeprefix("self.")}
        if code in (*seen, NONE):
            return set()
        inner: list[cst.BaseExpression] = []
        if isinstance(value, cst.Call):
            is_class = CLASS.search(source(value.func))
            args = [each for each in value.args if not isinstance(each.value, cst.Lambda)]
            named = [each for each in args if each.keyword and each.keyword.value == "params"]
            is_collected = last_name(value.func) in COLLECTING
            used = (named or args[:1]) if is_class else args if is_collected else []
            inner = [each.value for each in used]
        elif isinstance(value, (cst.List, cst.Tuple)):
            inner = [element.value for element in value.elements]
        elif isinstance(value, cst.Dict):
            inner = [one.value for one in value.elements if "params" in source(one)[:8]]
        elif isinstance(value, (cst.ListComp, cst.GeneratorExp)):
            inner = [value.for_in.iter]
        elif isinstance(value, cst.BinaryOperation):
            inner = [value.left, value.right]
        elif isinstance(value, (cst.Name, cst.Attribute)):
            inner = self.values_of(code)
        found = (self._models_in(each, (*seen, code)) for each in inner)
        return set().union(*found) if inner else {UNKNOWN}

    def is_zeroed_by(self, optimizer: str, owner: str) -> bool:
        """Return whether ``owner.zero_grad()`` zeroes all gradients of an optimizer."""
        name = owner.removeprefix("self.")
        models = self.models_of(optimizer)
        return owner == optimizer or all(f"{each}.".startswith(f"{name}.") for each in models)
