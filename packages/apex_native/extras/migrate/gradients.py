"""Gradients: the steps of the optimizers, and where the gradients are unscaled before them."""

import builtins
import re
from collections.abc import Iterator, Sequence
from typing import Any

import libcst as cst
from libcst.metadata import PositionProvider, QualifiedNameProvider

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
    r".*(state_dict|synchronize)|(?!.*grad)((get|step|register|on)_|log|print|consolidate)\w*)$"
)
# In the name of a function or class that may change the gradients of a model that it is given.
CHANGING = re.compile(r"clip|grad(?!\w*penalty)", re.IGNORECASE)
# A call that returns the size of a parameter, or a sum of sizes.
COUNT = re.compile(r".*\.numel\(\)$|(\w+\.)?sum\(.*\.numel\(\)", re.DOTALL)
NORM = re.compile(r"(^|\.)clip_grad_norm_?$")  # a function that returns the norm
CLASS = re.compile(r"(^|\.)[A-Z]\w*$")
OTHER_BLOCK = "gradients are clipped in another block than step()"
BRANCHES = (cst.MatchCase, cst.ExceptHandler, cst.ExceptStarHandler)
SCHEDULE = re.compile(
    r"LR|Lr[A-Z]|(^|\W|_)lr|[Ll]earning_?[Rr]ate|[Ss]ched|[Ww]arm|[Aa]nneal|[Cc]ycl"
)
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
        self.defined: set[str] = set()  # functions of this file
        self.classes: dict[str, set[str]] = {}  # of this file, and names in their bases
        self.handling: set[str] = set()  # functions of this file that catch exceptions
        self.suppressing = {"suppress"}  # context managers that may catch an exception
        self.models: set[str] = set()
        self.assigned: list[tuple[cst.BaseExpression, cst.BaseExpression]] = []  # target, value
        self.loop_names: set[str] = set()  # targets of for loops
        self.has_value = False  # which reads gradients: a lambda, or a function that clips

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

    def check_steps(self, is_pending: bool) -> None:
        """Require one step for each backward pass, and gradients that are read only before it.

        If a backward pass and its step are apart, any function may run in between.
        """
        covered: set[cst.CSTNode] = set()
        for optimizer in self.usage.scalers:
            steps = self.steps_of(optimizer)
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
                covered |= self._place_unscale(optimizer, step)
        if self.has_value:
            self.usage.reasons.append(
                "a lambda or a function that is passed on reads gradients, which GradScaler scales"
            )
        for statement, grad in self.readers:
            losses = self.usage.losses
            is_repeated = any(self._is_repeated(statement, loss) for loss in losses)
            is_between = is_pending and not self._is_of_optimizer(statement)
            follows = any(self._follows(statement, loss) for loss in losses)
            if not (is_repeated or is_between or follows):
                continue
            is_scaled = is_repeated or self._is_clipped_scaled(statement)
            if grad:
                self.usage.reasons.append(f"{grad} is read, which GradScaler keeps scaled")
            elif statement not in covered or is_scaled:
                self.usage.reasons.append(OTHER_BLOCK)
        self._check_helpers(covered)
        self._check_imported()
        self._check_unscaled(is_pending)

    def _is_clipped_scaled(self, statement: cst.CSTNode) -> bool:
        """Return whether gradients of an optimizer are scaled at a statement that clips some."""
        before = [
            line
            for line in self.usage.unscale
            if self.function(line) is self.function(statement)
            and self.line(line) <= self.line(statement)
        ]
        unscaled = {owner for line in before for owner in self.usage.unscale[line]}
        return any(self._is_scaled_at(statement, each) for each in {*self.usage.scalers} - unscaled)

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
            if any(self._is_scaled_at(use, each) for each in self.usage.scalers):
                self.usage.reasons.append(
                    f"{access}, and may read their gradients, which GradScaler scales"
                )

    def _access(
        self, name: str, call: cst.Call, parameters: set[str], holders: dict[str, str]
    ) -> str:
        """Return how a call has the parameters, or "" if it has not.

        By its arguments, or as an object that has them or one of its methods that is not ORDINARY,
        or of a class that is CHANGING.
        """
        code = source(call.func)
        owner, _, method = code.rpartition(".")
        if self._is_given(call, parameters) and name not in {*self.defined, *HARMLESS}:
            return f"{name} is given the parameters before the step"
        if code in holders:
            return f"{code} has the parameters"
        if not isinstance(call.func, (cst.Name, cst.Attribute)):
            return f"{code} may have the parameters"
        is_ordinary = ORDINARY.search(method) or SCHEDULE.search(code)
        if owner in holders and (CHANGING.search(holders[owner]) or not is_ordinary):
            return f"{code} is a method of an object that has the parameters"
        return ""

    def _is_scaled_at(self, call: cst.CSTNode, optimizer: str) -> bool:
        """Return whether a call is between a loss of an optimizer and the first step after it.

        Or in their loop, if the step does not follow each time. If all of its losses are in other
        functions, return whether a step comes after the call.
        """
        here = self.line(call)
        losses = self.beside(call, [loss.statement for loss in self.losses_of(optimizer)])
        steps = self.beside(call, self.steps_of(optimizer))
        loops = {*self.loops(call)}
        is_pending = any(loops & {*self.parents(step)} for step in steps) and not all(
            any(self.follows_always(step, loss) for step in steps) for loss in losses
        )
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
        """Return whether an optimizer or parameters are among the arguments of a call.

        Or a model, if the name of the function or class is CHANGING.
        """
        is_changing = CHANGING.search(source(call.func).rpartition(".")[2])
        owners = {*self.usage.scalers, *(self.models if is_changing else ())}
        return any(
            source(arg.value) in owners or _is_computed_from(arg.value, parameters)
            for arg in call.args
        )

    def _holders(self, parameters: set[str]) -> dict[str, str]:
        """Return the objects that are given an optimizer or parameters, with their class's name.

        Except objects of this file's classes, and learning rate schedules. And the optimizers, with
        no name.
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
            and self._is_given(call, parameters)
        }
        own = {target for target, code, _ in made if code in self.classes}
        holders = given | dict.fromkeys(self.usage.scalers, "")
        return {owner: code for owner, code in holders.items() if owner not in own}

    def beside(self, node: cst.CSTNode, others: list[Any]) -> list[cst.CSTNode]:
        """Return those of `others` in the function of a node, and the calls of their functions."""
        here = self.function(node)
        names = {function_name(self.function(other)) for other in others}
        others = [
            *others,
            *(call for name, call in self.calls if name in names and is_own(name, call)),
        ]
        return [other for other in others if self.function(other) is here]

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

    def _check_helpers(self, covered: set[cst.CSTNode]) -> None:
        """Require that no function which a training step calls reads gradients.

        Methods of optimizers that the script defines are called by GradScaler, or after it.
        """
        readers = {self.function(each) for each, _ in self.readers if each not in covered}
        helpers = {each for each in readers if not self._is_of_optimizer(each)}
        for name, call in self._uses(helpers):
            here = self._losses_beside(call)
            if not here or any(self._follows(call, loss) for loss in here):
                self.usage.reasons.append(f"{name} reads gradients, which GradScaler scales")

    def _is_of_optimizer(self, node: cst.CSTNode) -> bool:
        """Return whether a node is in ``step`` or ``zero_grad`` of an optimizer's class."""
        around = function = self.function(node)
        while not isinstance(around, (cst.Module, cst.ClassDef)):
            around = self.parent(around)
        bases = around.bases if isinstance(around, cst.ClassDef) else ()
        is_optimizer = any(OPTIMIZER.search(source(base)) for base in bases)
        return is_optimizer and function_name(function) in ("step", "zero_grad")

    def _check_unscaled(self, is_pending: bool) -> None:
        """Require that all losses of a training step are scaled, or none."""
        backward = [
            call
            for name, call in self.calls
            if name == "backward"
            and isinstance(call.func, cst.Attribute)
            or self._is_named(call, "torch.autograd.backward")
        ]
        training = self._training()
        uses: list[tuple[str, cst.CSTNode]] = [
            (source(call), call)
            for call in backward
            if is_pending or self.function(call) in training
        ]
        uses += self._uses({self.function(call) for call in backward})
        for what, use in uses:
            here: set[cst.CSTNode] = {loss.statement for loss in self._losses_beside(use)}
            is_scaled = here & {*self.parents(use)}
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

    def _follows(self, statement: cst.CSTNode, loss: Loss) -> bool:
        """Return whether a statement comes after a backward pass in the same function.

        And not in another branch.
        """
        if self.function(statement) is not self.function(loss.statement):
            return False
        end = self.get_metadata(PositionProvider, loss.statement).end.line
        return self.line(statement) > end and not self.are_branches(statement, loss.statement)

    def _is_repeated(self, statement: cst.CSTNode, loss: Loss) -> bool:
        """Return whether a loop repeats a statement and a backward pass, but not the step."""
        steps = self.beside(loss.statement, self.steps_of(loss.optimizer))
        loops = {*self.loops(statement)} & {*self.loops(loss.statement)}
        return not all(any(loop in self.parents(step) for step in steps) for loop in loops)

    def _place_unscale(self, optimizer: str, step: cst.Call) -> set[cst.CSTNode]:
        """Unscale before gradients are read, and return the statements that read them."""
        block, end = next(iter(self.levels(self.statement(step))))
        losses = self.losses_of(optimizer)
        here = [each for each in losses if self.function(each.statement) is self.function(step)]
        calls = self.beside(step, [each.statement for each in losses])
        covered: set[cst.CSTNode] = set()
        for statement, grad in self.readers:
            around = {statement, *self.parents(statement)}
            index = next((i for i, line in enumerate(block.body) if line in around), None)
            if grad or index is None or self.function(statement) is not self.function(step):
                continue
            covered.add(statement)
            before = [each for each in here if self._follows(statement, each)]
            is_after = any(self.line(one) < self.line(statement) for one in calls) and not here
            if index > end or (calls and not (is_after or before)):
                continue
            done = self._unscaled(optimizer, statement, before)
            if done:
                if not all(done):
                    self.usage.reasons.append(OTHER_BLOCK)
                continue
            place = block.body[index]
            if any(place in self.parents(each.statement) for each in before):
                if not {*self.loops(statement)} <= {*self.parents(step)}:
                    self.usage.reasons.append("gradients are clipped in a loop without step()")
                blocks = {*self.parents(before[-1].statement)}
                path = [statement, *self.parents(statement)]
                place = next(each for each in path if self.parent(each) in blocks)
            self.usage.unscale.setdefault(place, []).append(optimizer)
        return covered

    def _unscaled(self, optimizer: str, reader: cst.CSTNode, losses: list[Loss]) -> list[bool]:
        """Return whether gradients of each loss are already unscaled at a reader, [] if none are.

        Where there are no losses, since they are in other functions, return whether any are.
        """
        places = [
            each
            for each, owners in self.usage.unscale.items()
            if optimizer in owners and self.function(each) is self.function(reader)
        ]
        found = [] if losses else [any(self.line(each) <= self.line(reader) for each in places)]
        for loss in losses:
            around = {*self.parents(loss.statement), *self.parents(reader)}
            lines = [self.line(each) for each in places if self.parent(each) in around]
            found.append(any(self.line(loss.statement) < n <= self.line(reader) for n in lines))
        return found if any(found) else []
