"""Optimizers: whether each name in a script stands for one, which has a GradScaler of its own."""

import re
from typing import Any

import libcst as cst

from .calls import models_and_optimizers
from .gradients import CLASS, OPTIMIZER, SCHEDULE, function_name
from .order import Order
from .places import NONE, is_own, last_name, last_names, names_in, new_name, source
from .tree import LOOPS

# In the name of an object whose ``step`` is none of an optimizer.
OTHERS = re.compile(
    r"^(self|super\(\)|(?!.*opt).*(prof|time|ema|log|meter|progress|bar|env).*)$", re.IGNORECASE
)
LATER = (cst.Lambda, cst.GeneratorExp)  # what is in it may run after the function
REPEATING = (*LOOPS, cst.BaseComp, cst.Lambda)


class Optimizers(Order):
    """Names the GradScalers, and checks that each of them has one optimizer."""

    def name_scalers(self, module: cst.Module) -> None:
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

    def reached(self, names: set[str]) -> set[str]:
        """Return the names of functions and of those that they call, also through others."""
        found, size = set(names), -1
        while size != len(found):
            size = len(found)
            found |= {
                name
                for name, call in self.calls
                if function_name(self.function(call)) in found
                and not any(isinstance(each, LATER) for each in self.parents(call))
            }
        return found

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

    def check_optimizers(self) -> None:
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
            if not (is_each_once or is_of_self or self.is_stepped_at_once(optimizer)):
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
        training = {self.function(node) for node in self.users()}
        names = self.reached({function_name(start)})
        if all(isinstance(one, cst.FunctionDef) and one.name.value in names for one in training):
            return True
        return all(self._runs_once(each) for each in self.starts)

    def _runs_once(self, node: cst.CSTNode, seen: tuple[cst.CSTNode, ...] = ()) -> bool:
        """Return whether a node runs once in a process, by the calls in this file."""
        here = self.function(node)
        if here in seen or any(isinstance(each, REPEATING) for each in self.parents(node)):
            return False
        if not isinstance(here, cst.FunctionDef):
            return True
        owner = self.owner(here)
        assert isinstance(owner, (cst.FunctionDef, cst.ClassDef))
        names = {owner.name.value}
        for name, bases in self.classes.items():  # subclasses follow their bases
            names |= {name} if names & bases else set()
        calls = [call for name, call in self.calls if name in names and is_own(name, call)]
        calls = [call for call in calls if self.function(call) is not here]
        is_entry = not calls and not isinstance(owner, cst.ClassDef)
        return is_entry or len(calls) == 1 and self._runs_once(calls[0], (*seen, here))

    def _check_other_steps(self) -> None:
        """Require that nothing else is stepped that may be an optimizer with scaled gradients."""
        prepared = set().union(*self.prepared(1))
        known: dict[str, bool] = {}  # objects, of which each value is one of a known class
        for target, value in self.assigned:
            is_made = isinstance(value, cst.Call) and bool(CLASS.search(source(value.func)))
            known[source(target)] = known.get(source(target), True) and is_made
        scalers = self.usage.scalers
        others = [(owner, False) for owner, _ in self.bound_steps]
        others += [
            (owner, not step.args and not known.get(owner, False))
            for owner, step in self.steps
            if owner not in scalers
        ]
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
