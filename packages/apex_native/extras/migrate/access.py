"""Gradients that GradScaler keeps scaled, and code that may read or change them there."""

import builtins
import re

import libcst as cst
from libcst import matchers

from .gradients import CLASS, OPTIMIZER, SCHEDULE, decorators, function_name
from .order import Order
from .places import LISTING, is_own, last_names, names_in, plain_source, source

# Parameters, of a model or of an optimizer's groups.
PARAMETERS = re.compile(
    r"\.(named_)?parameters\(\)|\.param_groups(\[\d+\])?(\[['\"]params['\"]\])?$"
)
HARMLESS = {*dir(builtins), *LISTING, "scale_loss", "master_params"}  # given parameters
# Methods and functions that need no gradients, or leave them scaled.
ORDINARY = re.compile(
    r"^(step|zero_grad|add_param_group|train|eval|write|batch_step|store|restore|to|cuda|"
    r".*(state_dict|synchronize)|(?!.*grad)((get|step|register|save)_|log|print|consolidate)\w*)$"
)
# In the name of a function or class that may change gradients.
CHANGING = re.compile(r"clip|(?<!zero_)(?<!requires_)grad(?!\w*penalty|_?scaler)", re.IGNORECASE)
CLIPPED = "gradients are clipped where GradScaler keeps them scaled: step() may not follow at once"
NAMELESS = re.compile(r"__(?!init__)\w+__|forward")  # methods called without their names


class Access(Order):
    """Checks of losses, which must all be scaled, and of reads of gradients, only unscaled ones."""

    def __init__(self) -> None:
        super().__init__()
        self.tainted: set[str] = set()  # names of parameters, optimizers and self
        self.holders: set[str] = set()  # objects that may have parameters
        self.running: dict[str, set[str]] = {}  # functions that are called where they are scaled

    def check_access(self) -> None:
        """Require that all losses are scaled, and gradients that are read only unscaled."""
        self._check_backward()
        if not self.exposed:
            return
        reasons = self.usage.reasons
        if self.has_value:
            reasons.append(
                "a lambda or a function that is passed on reads gradients, which GradScaler scales"
            )
        self._find_holders()
        forward = self._find_running()
        uncalled = self._uncalled()
        for statement, grad in self.readers:
            is_unused = function_name(self.function(statement)) in uncalled
            if not self._is_of_optimizer(statement) and (is_unused or self._is_scaled(statement)):
                is_read = f"{grad} is read, which GradScaler keeps scaled"
                reasons.append(is_read if grad else CLIPPED)
        for name, call in self.calls:
            is_scaled = "clip_grad" not in name and self._is_scaled(call)
            access = self._access(name, call, call in forward) if is_scaled else ""
            if access:
                reasons.append(f"{access}, and may read their gradients, which GradScaler scales")
        for optimizer, names in self.running.items():
            others = {*self.usage.scalers} - {optimizer}
            if any(
                function_name(self.function(reset)) in names
                and not any(self.is_zeroed_by(other, owner) for other in others)
                for owner, reset in self.resets
            ):
                reasons.append(f"gradients may be zeroed before {optimizer}.step()")

    def _find_running(self) -> set[cst.Call]:
        """Find what is called where gradients may be scaled, and return calls in forward passes."""
        covered = set().union(*(loss.covered for loss in self.usage.losses))
        forward = {call for _, call in self.calls if covered & {*self.parents(call)}}
        for optimizer, exposed in self.exposed.items():
            # Their own code is known by its place. A call such as model.train() is none of train().
            own = frozenset(function_name(self.function(step)) for _, step, _ in exposed)
            names = {
                name
                for name, call in self.calls
                if call not in forward and self._is_scaled_at(call, optimizer)
            }
            self.running[optimizer] = self.reached(names, own) - own
        return forward

    def _check_backward(self) -> None:
        """Require that all losses are scaled, or of a branch without amp, or behind unscale_."""
        losses = [loss.statement for loss in self.usage.losses]
        for name, call in self.calls:
            is_tensor = name == "backward" and isinstance(call.func, cst.Attribute)
            names = self.qualified_names(call.func)
            is_function = any(each.name == "torch.autograd.backward" for each in names)
            if not is_function and (not is_tensor or name in self.defined and is_own(name, call)):
                continue
            here = [one for one in losses if self.function(one) is self.function(call)]
            is_scaled = {*here} & {*self.parents(call)} or all(
                self.is_unscaled(call, optimizer) for optimizer in self.usage.scalers
            )
            if not is_scaled and not any(self.are_branches(call, one) for one in here):
                self.usage.reasons.append(
                    f"{source(call)} is not scaled; GradScaler would unscale its gradients, too, "
                    "if the same step uses them"
                )

    def _is_scaled(self, node: cst.CSTNode) -> bool:
        return any(self._is_scaled_at(node, optimizer) for optimizer in self.exposed)

    def _is_scaled_at(self, node: cst.CSTNode, optimizer: str) -> bool:
        """Return whether gradients of an optimizer may be scaled at a node.

        Between a backward pass and the step, also of what is called there. If gradients accumulate,
        in all of the function, except for the block of the step after it, and a start without
        ``amp.initialize``.
        """
        here, line = self.function(node), self.line(node)
        exposed = [each for each in self.exposed[optimizer] if self.function(each[1]) is here]
        if not exposed:
            return function_name(here) in self.running.get(optimizer, ())
        if self.is_unscaled(node, optimizer):
            return False
        for begin, step, accumulates in exposed:
            loops = self.loops(step)
            is_start = here is self.function(self.starts[0]) and bool(loops)
            is_after = self.block(step) in {*self.parents(node)} and line > self.line(step)
            if accumulates and not is_after and not (is_start and line < self.line(loops[-1])):
                return True
            if begin <= line < self.line(step):
                return True
        return False

    def _uncalled(self) -> set[str]:
        """Return the functions that may be called without their names, or by other files."""
        called = {name for name, _ in self.calls}
        return {
            name
            for name, functions in self.defined.items()
            if name not in called
            or name in self.values
            or NAMELESS.fullmatch(name)
            or any("property" in source(each) for one in functions for each in decorators(one))
        }

    def _is_of_optimizer(self, node: cst.CSTNode) -> bool:
        """Return whether a node is in ``step`` or ``zero_grad`` of an optimizer's class."""
        function = self.function(node)
        bases = getattr(self.owner(function), "bases", ())
        is_optimizer = any(OPTIMIZER.search(source(base)) for base in bases)
        return is_optimizer and function_name(function) in ("step", "zero_grad")

    def _find_holders(self) -> None:
        """Find names of parameters, and the objects that are given them, self or a model."""
        for target, value in self.assigned:
            called = source(value.func) if isinstance(value, cst.Call) else ""
            is_optimizer = OPTIMIZER.search(called) or called.endswith("initialize")
            if not is_optimizer and self._has_parameters(value):
                self.tainted |= names_in(target)
        self.tainted -= {owner.removeprefix("self.") for owner, _ in self.steps}
        self.holders = {*self.usage.scalers}
        for target, value in self.assigned:
            called = source(value.func) if isinstance(value, cst.Call) else ""
            is_other = any(each.search(called) for each in (OPTIMIZER, SCHEDULE))
            if not CLASS.search(called) or is_other or called in self.classes:
                continue
            assert isinstance(value, cst.Call)
            is_model = bool(last_names(target) & self.models)  # such as DataParallel(model)
            is_changing = CHANGING.search(called.rpartition(".")[2])
            if is_changing or self._is_given(value) and not is_model:
                self.holders.add(source(target))

    def _has_parameters(self, value: cst.BaseExpression) -> bool:
        return bool(PARAMETERS.search(plain_source(value)) or names_in(value) & self.tainted)

    def _is_given(self, call: cst.Call) -> bool:
        """Return whether an optimizer, parameters, a model or ``self`` are among the arguments."""
        values = [arg.value for arg in call.args]
        names = {source(value) for value in values} & {*self.usage.scalers, "self"}
        models = set().union(*map(last_names, values)) & self.models
        return bool(names or models) or any(map(self._has_parameters, values))

    def _access(self, name: str, call: cst.Call, is_forward: bool) -> str:
        """Return how a call may have the parameters, or "" if it does not."""
        code = source(call.func)
        owner, _, method = code.rpartition(".")
        is_quiet = ORDINARY.search(method) or SCHEDULE.search(code)
        if code in self.holders:
            return f"{code} has the parameters"
        if owner in self.holders and (CHANGING.search(owner) or not is_quiet):
            return f"{code} is a method of an object that has the parameters"
        is_given = any(self._has_parameters(arg.value) for arg in call.args)
        names = self.qualified_names(call.func)
        is_library = any(re.match(r"(torch|numpy)\.", each.name) for each in names)
        if name in {*self.defined, *HARMLESS} or is_quiet:
            return ""
        if is_given or self._is_given(call) and not (is_library or is_forward):
            return f"{name} is given the parameters before the step"
        if is_library or is_forward:
            return ""
        known = set().union(*(names_in(target) for target, _ in self.assigned))
        is_inherited = owner == "self" and method not in known or owner.startswith("super(")
        is_made = matchers.findall(call.func, matchers.Call())
        is_name = isinstance(call.func, (cst.Name, cst.Attribute))
        if not is_name or is_inherited or CHANGING.search(code if is_made else method):
            return f"{code} may have the parameters"
        return ""
