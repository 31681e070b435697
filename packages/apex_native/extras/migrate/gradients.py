"""Gradients: the steps of the optimizers, and where the gradients are unscaled before them."""

import builtins
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import libcst as cst
from libcst.metadata import QualifiedNameProvider

from .places import ADDING, apex_name, is_own, names_in, plain_source, simplify, source
from .tree import Tree
from .usage import Loss, Usage

# In the name of a class whose ``step`` GradScaler calls.
OPTIMIZER = re.compile(r"Optim|SGD|Adam|LAMB|LARS|LARC|Adagrad|NovoGrad|RMSprop|Rprop")
# Parameters, of a model or of an optimizer's groups.
PARAMETERS = re.compile(
    r"\.(named_)?parameters\(\)|\.param_groups(\[\d+\])?(\[['\"]params['\"]\])?$"
)
HARMLESS = {*dir(builtins), *ADDING, "scale_loss", "master_params"}  # given parameters
# Methods that need no gradients, or leave them scaled, of an optimizer or of what is given it.
ORDINARY = re.compile(
    r"^(step|zero_grad|add_param_group|train|eval|write|batch_step|store|restore|"
    r".*(state_dict|synchronize)|(?!.*grad)((get|step|register)_|log|print|consolidate)\w*)$"
)
# In the name of a function or class that may change gradients.
CHANGING = re.compile(r"clip|(?<!zero_)(?<!requires_)grad(?!\w*penalty|_?scaler)", re.IGNORECASE)
# A call that returns the size of a parameter, or a sum of sizes.
COUNT = re.compile(r".*\.numel\(\)$|(\w+\.)?sum\(.*\.numel\(\)", re.DOTALL)
NORM = re.compile(r"(^|\.)clip_grad_norm_?$")  # a function that returns the norm
CLASS = re.compile(r"(^|\.)[A-Z]\w*$")
CLIPPED = "gradients are clipped where GradScaler keeps them scaled: step() may not follow at once"
BRANCHES = (cst.MatchCase, cst.ExceptHandler, cst.ExceptStarHandler)
SCHEDULE = re.compile(
    r"LR|Lr[A-Z]|(^|\W|_)lr|[Ll]earning_?[Rr]ate|[Ss]ched|[Ww]arm|[Aa]nneal|[Cc]ycl"
)
Assignment = tuple[cst.BaseExpression, cst.BaseExpression]  # target, value
NAMELESS = re.compile(r"__(?!init__)\w+__|forward")  # methods called without their names


def function_name(function: cst.CSTNode) -> str:
    """Return the name of a function, or "" for a module."""
    return function.name.value if isinstance(function, cst.FunctionDef) else ""


def decorators(function: cst.CSTNode) -> list[str]:
    """Return the source code of the decorators of a function."""
    found = function.decorators if isinstance(function, cst.FunctionDef) else ()
    return [source(each.decorator) for each in found]


class _Numbers(cst.CSTTransformer):
    """Replacement of numbers of parameters, and of norms of gradients, by None."""

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        is_count = len(original_node.args) <= 1 and COUNT.match(plain_source(original_node))
        is_norm = NORM.search(plain_source(original_node.func))
        none = cst.Name("None", lpar=updated_node.lpar, rpar=updated_node.rpar)
        return none if is_count or is_norm else updated_node


def _is_computed_from(value: cst.BaseExpression, parameters: set[str]) -> bool:
    """Return whether parameters are in `value`, of a model or under these names."""
    rest = value.visit(_Numbers())
    assert isinstance(rest, cst.BaseExpression)
    return bool(PARAMETERS.search(plain_source(rest)) or names_in(rest) & parameters)


class Gradients(Tree):
    """Finds a place for the calls of GradScaler, in what a visit of the module has found."""

    def __init__(self) -> None:
        super().__init__()
        self.usage = Usage()
        self.starts: list[cst.Call] = []
        self.steps: list[tuple[str, cst.Call]] = []
        self.jumps: Sequence[cst.CSTNode] = ()  # that leave a function or loop, or pause it
        self.resets: list[tuple[str, cst.CSTNode]] = []  # zero_grad(), by object, and p.grad = None
        self.bound_steps: list[tuple[str, cst.CSTNode]] = []  # used without a call
        self.readers: list[tuple[cst.CSTNode, str]] = []  # statements that read gradients
        self.states: list[cst.Call] = []
        self.calls: list[tuple[str, cst.Call]] = []  # of functions and methods, by name
        self.values: set[str] = set()  # names that are passed on or assigned
        # Names of what is imported from Apex, with its import, or None in place of it.
        self.imports: list[tuple[str, cst.CSTNode, bool]] = []
        self.questions: list[cst.CSTNode] = []  # tests whether Apex was imported
        self.defined: set[str] = set()  # functions of this file
        self.classes: dict[str, set[str]] = {}  # of this file, and names in their bases
        self.handling: set[str] = set()  # functions of this file that catch exceptions
        self.suppressing = {"suppress"}  # context managers that may catch an exception
        self.assigned: list[Assignment] = []
        self.loop_names: set[str] = set()  # targets of for loops
        self.models: set[str] = set()  # names of those that amp prepares
        self.has_value = False  # which reads gradients: a lambda, or a function that clips
        # Where the gradients of an optimizer are unscaled: from a statement or line, to a step.
        self.windows: dict[str, list[tuple[int, cst.Call]]] = {}
        # Optimizers whose gradients are not unscaled right after each backward pass, and whether
        # other functions may run before.
        self.exposed: dict[str, bool] = {}

    def name(self, node: cst.CSTNode) -> str:
        """Return the name of Apex that `node` has, or ""."""
        return apex_name(
            self.get_metadata(QualifiedNameProvider, node, set()), self.usage.fallbacks
        )

    def simplified(self, test: cst.BaseExpression) -> cst.BaseExpression | bool:
        """Return a condition as it is where Apex can be imported."""
        return simplify(test, lambda node: self.usage.is_available(node, self.name(node)))

    def tests(self, node: cst.CSTNode) -> set[tuple[str, bool]]:
        """Return the tests of the ifs around `node`, and whether they hold there.

        And the other branches around it, by their lines.
        """
        branches = (each for each in self.parents(node) if isinstance(each, BRANCHES))
        return {(f"line {self.line(each)}", True) for each in branches} | {
            (source(each.test), holds)
            for each, holds in self.conditions(node)
            if not isinstance(self.simplified(each.test), bool)
        }

    def users(self) -> list[Any]:
        """Return the scaled losses, the steps of their optimizers, and calls for amp's state."""
        losses = [loss.statement for loss in self.usage.losses]
        owners = {loss.optimizer for loss in self.usage.losses}
        return [*losses, *(node for owner, node in self.steps if owner in owners), *self.states]

    def losses_of(self, optimizer: str) -> list[Loss]:
        """Return the scaled losses of an optimizer."""
        return [loss for loss in self.usage.losses if loss.optimizer == optimizer]

    def steps_of(self, optimizer: str) -> list[cst.Call]:
        """Return the calls of ``step`` of an optimizer."""
        return [step for owner, step in self.steps if owner == optimizer]

    def check_steps(self) -> None:
        """Require one step for each backward pass, and gradients that are read only unscaled."""
        blocks = {loss.statement for loss in self.usage.losses}
        for optimizer in self.usage.scalers:
            steps = self.steps_of(optimizer)
            # There, gradients are still scaled with Apex. And unscale_ would come after the step.
            if any(blocks & {*self.parents(each)} for each in self.leading(steps)):
                self.usage.reasons.append(f"{optimizer}.step() is inside of amp.scale_loss")
            if not steps or any(
                not self._exclude(one, other, optimizer)
                for index, one in enumerate(steps)
                for other in steps[:index]
            ):
                self.usage.reasons.append(f"GradScaler needs one {optimizer}.step() in this file")
            for step in steps:
                line = self.statement(step)
                is_alone = isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1
                if step.args or not is_alone or not isinstance(self.parent(step), cst.Expr):
                    self.usage.reasons.append(f"{optimizer}.step() is not a statement of its own")
        if self.exposed:
            self._check_readers()
            self._check_imported()
        self._check_unscaled()

    def is_unscaled(self, node: cst.CSTNode, optimizer: str) -> bool:
        """Return whether the gradients of an optimizer are unscaled at a node, before the step."""
        return any(
            self.function(node) is self.function(step)
            and first <= self.line(node) < self.line(step)
            for first, step in self.windows[optimizer]
        )

    def _check_readers(self) -> None:
        """Require that gradients are read or clipped only where they are unscaled.

        Methods of optimizers that the script defines are called by GradScaler, or after it.
        """
        if self.has_value:
            self.usage.reasons.append(
                "a lambda or a function that is passed on reads gradients, which GradScaler scales"
            )
        readers = [each for each in self.readers if not self._is_of_optimizer(each[0])]
        for statement, grad in readers:
            if self._is_scaled(statement) or self._is_apart(statement):
                is_read = f"{grad} is read, which GradScaler keeps scaled"
                self.usage.reasons.append(is_read if grad else CLIPPED)
        helpers = {self.function(each) for each, _ in readers if not self._is_covered(each)}
        for name, use in self._uses(helpers):
            if isinstance(use, cst.FunctionDef) or self._is_scaled(use):
                self.usage.reasons.append(f"{name} reads gradients, which GradScaler scales")

    def _is_apart(self, node: cst.CSTNode) -> bool:
        """Return whether gradients may be scaled in a function without the loss and the step."""
        is_apart = any(
            is_pending
            and not (
                self.beside(node, [loss.statement for loss in self.losses_of(optimizer)])
                and self.beside(node, self.steps_of(optimizer))
            )
            for optimizer, is_pending in self.exposed.items()
        )
        return is_apart and not self._is_covered(node)

    def _is_covered(self, node: cst.CSTNode) -> bool:
        return any(self.is_unscaled(node, optimizer) for optimizer in self.usage.scalers)

    def _is_scaled(self, node: cst.CSTNode) -> bool:
        return any(self._is_scaled_at(node, optimizer) for optimizer in self.exposed)

    def _check_imported(self) -> None:
        """Require that no code of another file that has the parameters runs before a step."""
        parameters = self._names_of_parameters()
        holders = self._holders(parameters)
        found: list[tuple[str, cst.CSTNode]] = []
        helpers: set[cst.CSTNode] = set()
        for name, call in self.calls:
            access = "" if "clip_grad" in name else self._access(name, call, parameters, holders)
            if access:
                found.append((access, call))
                helpers.add(self.function(call))
        found += [(f"{name} may have the parameters", use) for name, use in self._uses(helpers)]
        for access, use in found:
            if self._is_scaled(use):
                self.usage.reasons.append(
                    f"{access}, and may read their gradients, which GradScaler scales"
                )

    def _access(
        self, name: str, call: cst.Call, parameters: set[str], holders: dict[str, str]
    ) -> str:
        """Return how a call has the parameters, or "" if it has not.

        By its arguments, or as an object that has them or one of its methods that is not ORDINARY,
        or of a class that is CHANGING, or as a method of another file's base class.
        """
        code = source(call.func)
        owner, _, method = code.rpartition(".")
        is_unknown = name not in {*self.defined, *HARMLESS}
        is_unused = SCHEDULE.search(code) or method.startswith(("get_", "save"))
        if is_unknown and not is_unused and self._is_given(call, parameters):
            return f"{name} is given the parameters before the step"
        if code in holders:
            return f"{code} has the parameters"
        is_name = isinstance(call.func, (cst.Name, cst.Attribute))
        if not is_name or is_unknown and self._may_change(call):
            return f"{code} may have the parameters"
        is_ordinary = ORDINARY.search(method) or SCHEDULE.search(code)
        if owner in holders and (CHANGING.search(holders[owner]) or not is_ordinary):
            return f"{code} is a method of an object that has the parameters"
        return ""

    def _may_change(self, call: cst.Call) -> bool:
        """Return whether a call is of an inherited method or of a name that is CHANGING.

        Or is given `self`, or a model in front of a step. Except forward passes, torch and numpy.
        """
        owner, _, method = source(call.func).rpartition(".")
        known = set().union(*(names_in(target) for target, _ in self.assigned))
        is_inherited = owner == "self" and method not in known or owner[:6] == "super("
        values = [source(arg.value) for arg in call.args]
        given = {each.removeprefix("self.").split(".")[0] for each in values} & self.models
        if not (
            is_inherited
            and not ORDINARY.search(method)
            or CHANGING.search(method)
            or "self" in values
            or given
            and self._is_in_front_of_step(call)
        ):
            return False
        forward = set().union(*(loss.covered for loss in self.usage.losses))
        names = self.get_metadata(QualifiedNameProvider, call.func, set())
        is_library = any(re.match(r"(torch|numpy)\.", each.name) for each in names)
        return not is_library and not forward & {*self.parents(call)}

    def _is_in_front_of_step(self, call: cst.CSTNode) -> bool:
        """Return whether a call is run between a loss and a step of its optimizer."""
        return any(
            self.line(loss) < self.line(each) < self.line(step)
            for each in self.leading([call])
            for optimizer in self.exposed
            for loss in self.beside(each, [one.statement for one in self.losses_of(optimizer)])
            for step in self.beside(each, self.steps_of(optimizer))
        )

    def _is_scaled_at(self, call: cst.CSTNode, optimizer: str) -> bool:
        """Return whether gradients of an optimizer are scaled at a call, after one of its losses.

        Or in their loop, if the step does not follow each time. If all of its losses are in other
        functions, return whether a step comes after the call.
        """
        here = self.line(call)
        if self.is_unscaled(call, optimizer):
            return False
        losses = self.beside(call, [loss.statement for loss in self.losses_of(optimizer)])
        steps = self.beside(call, self.steps_of(optimizer))
        loops = {*self.loops(call)}
        around = {each for step in steps for each in self.parents(step)}
        is_pending = bool(loops & around) and not all(
            any(self.follows_always(step, loss) for step in steps) for loss in losses
        )
        is_pending |= any(loops & {*self.parents(loss)} - around for loss in losses)
        before = [
            each for each in losses if self.line(each) < here and not self.are_branches(call, each)
        ]
        if losses and not before:
            return is_pending
        latest = max(before, key=self.line, default=call)
        known = self.tests(latest) | self.tests(call)
        is_done = any(
            self.line(latest) <= self.line(each) < here
            and not self.are_branches(call, each)
            and self.tests(each) <= known
            for each in steps
        )
        return not is_done and (is_pending or any(here < self.line(each) for each in steps))

    def follows_always(self, step: cst.CSTNode, loss: cst.CSTNode) -> bool:
        """Return whether a step is below a loss of its function, and has no condition more."""
        return self.line(step) > self.line(loss) and self.tests(step) <= self.tests(loss)

    def _is_given(self, call: cst.Call, parameters: set[str]) -> bool:
        """Return whether an optimizer or parameters are among the arguments of a call."""
        return any(
            source(arg.value) in self.usage.scalers or _is_computed_from(arg.value, parameters)
            for arg in call.args
        )

    def _holders(self, parameters: set[str]) -> dict[str, str]:
        """Return the objects that may have an optimizer or parameters, with their class's name.

        They are given them, or of a class that is CHANGING, except this file's classes, and
        learning rate schedules. And the optimizers, with no name.
        """
        made = [
            (source(target), source(value.func), value)
            for target, value in self.assigned
            if isinstance(value, cst.Call)
        ]
        given = {
            target: code.rpartition(".")[2]
            for target, code, call in made
            if CLASS.search(code)
            and not any(each.search(code) for each in (OPTIMIZER, SCHEDULE))
            and (CHANGING.search(code.rpartition(".")[2]) or self._is_given(call, parameters))
        }
        own = {target for target, code, _ in made if code in self.classes}
        holders = given | dict.fromkeys(self.usage.scalers, "")
        return {owner: code for owner, code in holders.items() if owner not in own}

    def callers(self, node: cst.CSTNode) -> list[cst.Call]:
        """Return the calls of the function of a node."""
        here = function_name(self.function(node))
        return [call for name, call in self.calls if name == here and is_own(name, call)]

    def leading(self, nodes: Iterable[Any]) -> list[cst.CSTNode]:
        """Return these nodes, and all calls that lead to them."""
        found = list(nodes)
        for each in found:
            found += [call for call in self.callers(each) if call not in found]
        return found

    def beside(self, node: cst.CSTNode, others: Iterable[Any]) -> list[cst.CSTNode]:
        """Return those of `others` in the function of a node, and its calls that lead to them."""
        return [each for each in self.leading(others) if self.function(each) is self.function(node)]

    def _names_of_parameters(self) -> set[str]:
        """Return the names of what is computed from parameters, except for optimizers."""
        found: set[str] = set()
        for target, value in self.assigned:
            called = source(value.func) if isinstance(value, cst.Call) else ""
            if OPTIMIZER.search(called) or called.endswith("initialize"):
                continue
            if _is_computed_from(value, found):
                found |= names_in(target)
        return found - {owner.removeprefix("self.") for owner, _ in self.steps}

    def _is_of_optimizer(self, node: cst.CSTNode) -> bool:
        """Return whether a node is in ``step`` or ``zero_grad`` of an optimizer's class."""
        around = function = self.function(node)
        while not isinstance(around, (cst.Module, cst.ClassDef)):
            around = self.parent(around)
        bases = around.bases if isinstance(around, cst.ClassDef) else ()
        is_optimizer = any(OPTIMIZER.search(source(base)) for base in bases)
        return is_optimizer and function_name(function) in ("step", "zero_grad")

    def _check_unscaled(self) -> None:
        """Require that all losses of a training step are scaled, or come behind ``unscale_``."""
        backward = [
            call
            for name, call in self.calls
            if name == "backward"
            and isinstance(call.func, cst.Attribute)
            or self._is_named(call, "torch.autograd.backward")
        ]
        is_pending = any(self.exposed.values())
        training = self._training()
        uses: list[tuple[str, cst.CSTNode]] = [
            (source(call), call)
            for call in backward
            if is_pending or self.function(call) in training
        ]
        uses += self._uses({self.function(call) for call in backward})
        for what, use in uses:
            here: set[cst.CSTNode] = {loss.statement for loss in self._losses_beside(use)}
            is_scaled = here & {*self.parents(use)} or all(
                self.is_unscaled(use, optimizer) for optimizer in self.usage.scalers
            )
            if not is_scaled and not any(self.are_branches(use, one) for one in here):
                self.usage.reasons.append(
                    f"{what} is not scaled; GradScaler would unscale its gradients, too, "
                    "if the same step uses them"
                )

    def _is_named(self, call: cst.Call, name: str) -> bool:
        names = self.get_metadata(QualifiedNameProvider, call.func, set())
        return any(each.name == name for each in names)

    def _training(self) -> set[cst.CSTNode]:
        """Return the functions with a scaled loss or a step of its optimizer."""
        places: list[cst.CSTNode] = [loss.statement for loss in self.usage.losses]
        places += [node for owner, node in self.steps if owner in self.usage.scalers]
        return {self.function(place) for place in places}

    def _losses_beside(self, node: cst.CSTNode) -> list[Loss]:
        """Return the scaled losses of the function of a node."""
        here = self.function(node)
        return [loss for loss in self.usage.losses if self.function(loss.statement) is here]

    def _uses(self, helpers: set[cst.CSTNode]) -> Iterator[tuple[str, cst.CSTNode]]:
        """Yield the calls of these functions in those that train, also by way of others.

        A function that may be called without its name, since it is passed on, is a method such as
        ``__call__``, or is never called by its name, is yielded itself.
        """
        training = self._training()
        found = {function_name(each): each for each in helpers if not self._losses_beside(each)}
        pauses = [each for each in self.jumps if isinstance(each, cst.Yield)]
        generators = {self.function(each) for each in pauses}
        for name, helper in found.items():
            is_called = any(called == name for called, _ in self.calls)
            is_passed = name in self.values or NAMELESS.fullmatch(name) or helper in generators
            is_passed = is_passed or any("property" in each for each in decorators(helper))
            if is_passed or not is_called and isinstance(helper, cst.FunctionDef):
                yield name, helper
        names = set(found)
        while True:
            calls = [(name, call) for name, call in self.calls if name in names]
            callers = {self.function(call) for _, call in calls} - training
            if names >= {function_name(each) for each in callers}:
                break
            names |= {function_name(each) for each in callers}
        for name, call in calls:
            if self.function(call) in training:
                yield name, call

    def are_branches(self, one: cst.CSTNode, other: cst.CSTNode) -> bool:
        """Return whether two nodes of a function are in different branches of a condition."""
        around = set(self.parents(other))
        common = next(each for each in self.parents(one) if each in around)
        return isinstance(common, (cst.If, cst.Match))

    def _exclude(self, one: cst.Call, other: cst.Call, optimizer: str) -> bool:
        """Return whether two steps never follow the same backward pass."""
        functions = {self.function(one), self.function(other)}
        if len(functions) > 1:
            losses = self.losses_of(optimizer)
            return functions <= {self.function(loss.statement) for loss in losses}
        return self.are_branches(one, other)
