"""Optimizers: whether each name in a script stands for one, which has a GradScaler of its own."""

import re
from typing import Any

import libcst as cst

from .access import Access
from .calls import models_and_optimizers
from .gradients import OPTIMIZER, SCHEDULE, function_name
from .places import NONE, last_name, last_names, names_in, new_name, source

# In the name of an object whose ``step`` is none of an optimizer.
OTHERS = re.compile(
    r"^(self|super\(\)|(?!.*opt).*(prof|time|ema|log|meter|progress|bar|env).*)$", re.IGNORECASE
)


class Optimizers(Access):
    """Names of the GradScalers, and checks that each of them has one optimizer."""

    def check_scalers(self, module: cst.Module) -> None:
        """Place the calls of GradScaler, and require that their order is certain."""
        self._name_scalers(module)
        self.place_scalers()
        self.check_order()
        self.check_access()
        self._check_optimizers()

    def _name_scalers(self, module: cst.Module) -> None:
        """Name a GradScaler for each optimizer, as an attribute if one class has all of amp."""
        usage = self.usage
        optimizers = list(dict.fromkeys(loss.optimizer for loss in usage.losses))
        if any(optimizer[0] in "[(" for optimizer in optimizers):
            usage.reasons.append("amp.scale_loss has several optimizers")
        for optimizer in optimizers:
            words = re.sub(r"\W+", "_", optimizer.removeprefix("self.")).strip("_")
            suffix = "" if len(optimizers) == 1 else f"_{words}"
            names = (f"scaler{suffix}", f"grad_scaler{suffix}")
            free = [each for each in names if each not in usage.scalers.values()]
            usage.scalers[optimizer] = new_name(module, free)
        if not all(usage.scalers.values()):
            usage.reasons.append("the script has variables called scaler and grad_scaler")
        if len(optimizers) > 1 and self.states:
            usage.reasons.append("amp.state_dict has one entry for several optimizers")
        if self._are_methods([*self.starts, *self.users()]):
            usage.scalers = {owner: f"self.{name}" for owner, name in usage.scalers.items()}
        first = next(iter(usage.scalers.values()), "")
        for lines in usage.autocast.values():
            for line, enabled in lines.items():
                lines[line] = enabled.replace("scaler.is_enabled", f"{first}.is_enabled")

    def _are_methods(self, nodes: list[Any]) -> bool:
        """Return whether all nodes are in methods of one class, whose objects have a dictionary."""
        functions = {self.function(node) for node in nodes}
        owners = {self.owner(function) for function in functions}
        first = {source(getattr(one, "params", one)).split(",")[0] for one in functions}
        owner = owners.pop()
        has_slots = re.search(r"\b__slots__\b|\bslots=True", source(owner))
        is_class = isinstance(owner, cst.ClassDef) and not owners and not has_slots
        return is_class and first == {"self"}

    def prepared(self, index: int) -> tuple[set[str], set[str]]:
        """Return the names that amp.initialize is given, and those for what it returns.

        Of models, or with `index` 1 of optimizers.
        """
        given: set[str] = set()
        returned: set[str] = set()
        for node in self.starts:
            values = models_and_optimizers(node)
            given |= last_names(values[index]) if index < len(values) else set()
            parent = self.parent(node)
            for each in parent.targets if isinstance(parent, cst.Assign) else ():
                items = getattr(each.target, "elements", ()) if len(values) > 1 else ()
                target = items[index].value if items else each.target
                returned |= last_names(target) if items or index == 0 else set()
        return given, returned

    def _check_optimizers(self) -> None:
        """Require that no step unscales the gradients of one optimizer by the scaler of another.

        Each optimizer must have a scaler of its own, or be stepped right after its backward pass.
        """
        scalers = self.usage.scalers
        is_each_once = self._is_each_once()
        start = self.function(self.starts[0])
        for optimizer, scaler in scalers.items():
            is_of_self = scaler[:5] == "self." and bool(re.fullmatch(r"self\.\w+", optimizer))
            aliases = self._aliases({optimizer.removeprefix("self.")})
            is_of_self = is_of_self and all(self.function(each) is start for each in aliases)
            if optimizer in self.exposed and not (is_each_once or is_of_self):
                self.usage.reasons.append(
                    f"{optimizer} may be several optimizers, of which one is stepped between "
                    "the backward pass and the step of another"
                )
        self._check_other_steps()

    def _aliases(self, names: set[str]) -> list[cst.CSTNode]:
        """Return the targets of assignments of other objects to optimizers of these names."""
        return [
            target
            for target, value in self.assigned
            if last_names(target) & names
            and isinstance(value, (cst.Name, cst.Attribute, cst.Subscript))
            and not {*names_in(value)} & {*names, NONE}
        ]

    def _is_each_once(self) -> bool:
        """Return whether each optimizer that amp prepares has one name, in all functions."""
        names = {last_name(cst.parse_expression(f"({owner})")) for owner in self.usage.scalers}
        made = set().union(*(last_names(one) for one, value in self.assigned if _is_made(value)))
        is_known = any(
            names == prepared or len(names) == len(prepared & made) == len(prepared) == 1
            for prepared in self.prepared(1)
        )
        given = [models_and_optimizers(each)[1:] for each in self.starts]
        count = sum(len(getattr(one, "elements", [one])) for each in given for one in each)
        is_other = bool(self._aliases(names)) or count != len(names)
        return is_known and not is_other and not names & self.loop_names and self._is_once()

    def _is_once(self) -> bool:
        """Return whether amp is initialized once, or by a function that trains, too."""
        start = self.function(self.starts[0])
        names = self.reached({function_name(start)})
        return not isinstance(start, cst.FunctionDef) or all(
            function_name(self.function(node)) in names for node in self.users()
        )

    def _check_other_steps(self) -> None:
        """Require that nothing else is stepped that may be an optimizer with scaled gradients."""
        scalers = self.usage.scalers
        prepared = set().union(*self.prepared(1))
        others = [(owner, False) for owner, _ in self.bound_steps]
        others += [(owner, not step.args) for owner, step in self.steps if owner not in scalers]
        for owner, is_unknown in others:
            is_prepared = (
                owner in scalers or last_names(cst.parse_expression(f"({owner})")) & prepared
            )
            is_other = SCHEDULE.search(owner) or OTHERS.search(owner)
            if (is_prepared or is_unknown) and not is_other:
                self.usage.reasons.append(
                    f"{owner}.step may be the step of an optimizer whose gradients are scaled"
                )


def _is_made(value: cst.BaseExpression) -> bool:
    code = source(value.func) if isinstance(value, cst.Call) else ""
    return bool(OPTIMIZER.search(code)) or code.endswith("optimizer")  # such as get_optimizer
