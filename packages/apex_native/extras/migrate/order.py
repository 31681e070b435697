"""Order of the calls of GradScaler: created, scale, unscale_, step and update."""

import re
from itertools import combinations, product

import libcst as cst
from libcst.metadata import QualifiedNameProvider

from .gradients import Gradients
from .places import apex_name, as_bool, names_in, plain_source, simplify, source
from .usage import Loss


def negated(test: cst.BaseExpression) -> cst.BaseExpression:
    """Return the opposite of a condition."""
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        return test.expression
    return cst.parse_expression(f"not ({source(test)})")


def parts(test: cst.BaseExpression, holds: bool) -> set[tuple[str, bool]]:
    """Return what is known where a test holds or does not: of "a and b", both parts."""
    if holds and isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And):
        return parts(test.left, True) | parts(test.right, True)
    return {(source(test).strip("()"), holds)}


class Order(Gradients):
    """Checks that each run of the script calls GradScaler's methods in the order it requires."""

    def __init__(self) -> None:
        super().__init__()
        self.starts: list[cst.Call] = []
        self.flags: set[str] = set()
        self.jumps: list[cst.CSTNode] = []  # break, continue and return

    def visit_Break(self, node: cst.Break) -> None:
        self.jumps.append(node)

    def visit_Continue(self, node: cst.Continue) -> None:
        self.jumps.append(node)

    def visit_Return(self, node: cst.Return) -> None:
        self.jumps.append(node)

    def name(self, node: cst.CSTNode) -> str:
        """Return the name of Apex that `node` has, or ""."""
        return apex_name(
            self.get_metadata(QualifiedNameProvider, node, set()), self.usage.fallbacks
        )

    def simplified(self, test: cst.BaseExpression) -> cst.BaseExpression | bool:
        """Return a condition as it is where Apex can be imported."""
        return simplify(test, lambda node: self.usage.is_available(node, self.name(node)))

    def is_of_amp(self, test: cst.BaseExpression | bool) -> bool:
        """Return whether a simplified condition is the one of ``amp.initialize``."""
        return not isinstance(test, bool) and as_bool(test, self.flags) == self.usage.condition

    def place_scalers(self) -> None:
        """Require that scalers, which are created where amp is initialized, are not used elsewhere.

        Before it, or outside of an ``if`` around it, they do not exist.
        """
        steps = [node for owner, node in self.steps if owner in self.usage.scalers]
        users = [*(loss.statement for loss in self.usage.losses), *steps, *self.states]
        here = self.function(self.starts[0])
        self.usage.is_global = isinstance(here, cst.FunctionDef) and any(
            self.function(node) is not here for node in users
        )
        start = self.line(self.starts[0])
        assert self.usage.start is not None
        around = self.tests(self.usage.start)
        for node in users:
            is_here = self.function(node) is here
            if is_here and self.line(node) < start:
                self.usage.reasons.append("amp or its optimizer is used before amp.initialize")
            elif not around <= (self.tests(node) if is_here else set()):
                self.usage.reasons.append(
                    "amp or its optimizer is used outside of the condition of amp.initialize"
                )

    def tests(self, node: cst.CSTNode) -> set[tuple[str, bool]]:
        """Return the tests of the ifs around `node`, and whether they hold there."""
        return {
            (source(each.test), holds)
            for each, holds in self.conditions(node)
            if not isinstance(self.simplified(each.test), bool)
        }

    def check_order(self) -> None:
        """Require a backward pass, then unscaled gradients, then the step, for each optimizer."""
        for optimizer in self.usage.scalers:
            losses = [loss for loss in self.usage.losses if loss.optimizer == optimizer]
            unscaled = [line for line, owners in self.usage.unscale.items() if optimizer in owners]
            for step in [step for owner, step in self.steps if owner == optimizer]:
                self._check_backward(optimizer, losses, step)
                self._check_loop(optimizer, losses, step)
                for statement in unscaled:
                    self._check_unscaled_until(losses, statement, step)
        for pair in combinations(self.usage.scalers, 2):
            self._check_shared(pair)

    def _check_shared(self, pair: tuple[str, str]) -> None:
        """Require that two optimizers with the same parameters are not stepped after both losses.

        Each step would unscale the gradients of these parameters.
        """
        one, other = map(self._modules, pair)
        both = [*product(one, other), *product(other, one)]
        steps = sorted((step for owner, step in self.steps if owner in pair), key=self.line)
        if not steps or not any(f"{part}.".startswith(f"{whole}.") for part, whole in both):
            return
        is_before = []
        for owner in pair:
            losses = [loss.statement for loss in self.usage.losses if loss.optimizer == owner]
            places = self.beside(steps[0], losses)
            is_before.append(any(self.line(each) < self.line(steps[0]) for each in places))
        if all(is_before):
            self.usage.reasons.append(
                f"{pair[0]} and {pair[1]} share parameters, whose gradients both would unscale"
            )

    def _modules(self, optimizer: str) -> set[str]:
        """Return the modules all of whose parameters an optimizer is given, if it is obvious."""
        found: set[str] = set()
        for target, value in self.assigned:
            code = plain_source(value) if source(target) == optimizer else ""
            if not re.search(r"\bif\b|\blambda\b", code):
                found.update(re.findall(r"([\w.\[\]]+)\.parameters\(\)", code))
        return found

    def _check_backward(self, optimizer: str, losses: list[Loss], step: cst.Call) -> None:
        """Require a backward pass before each step, which fails without gradients."""
        places = self.beside(step, [loss.statement for loss in losses])
        later = [each for each in places if self.line(each) > self.line(step)]
        if places and len(later) == len(places) and not self.are_branches(step, later[0]):
            self.usage.reasons.append(f"{optimizer}.step() is in front of its backward pass")
        known = {test for each, holds in self.conditions(step) for test in parts(each.test, holds)}
        for group in (places, [loss.statement for loss in losses]):
            if group and all(self._may_be_skipped(place, known) for place in group):
                self.usage.reasons.append(
                    f"{optimizer}.step() lacks the condition of its backward pass"
                )

    def _may_be_skipped(self, place: cst.CSTNode, known: set[tuple[str, bool]]) -> bool:
        """Return whether a backward pass has a condition that is not among the `known` ones."""
        for each, holds in self.conditions(place):
            other = each.orelse if holds else each.body
            test = self.simplified(each.test if holds else negated(each.test))
            if isinstance(test, bool) or self.is_of_amp(test) or parts(each.test, holds) <= known:
                continue
            if other is None or "backward" not in plain_source(other):
                return True
        return False

    def _check_loop(self, optimizer: str, losses: list[Loss], step: cst.Call) -> None:
        """Require one step for each backward pass, of an expression that stays one optimizer."""
        expression = cst.parse_expression(optimizer)
        is_item = isinstance(expression, cst.Subscript) and names_in(expression.slice[0])
        targets: set[str] = set()
        for each in [step, *(loss.statement for loss in losses)]:
            for loop in self.parents(each):
                targets |= names_in(loop.target) if isinstance(loop, cst.For) else set()
        varies = is_item or optimizer.split(".")[0] in targets
        loops = [self.loop(loss.statement) for loss in losses]
        if varies and any(loop is not self.loop(step) for loop in loops):
            self.usage.reasons.append(f"{optimizer} is stepped in another loop than its losses")
        places = self.beside(step, [loss.statement for loss in losses])
        around = {each for place in places for each in self.parents(place)}
        if places and not {self.loop(step)} <= {None, *around}:
            self.usage.reasons.append(f"{optimizer}.step() is in a loop without its backward pass")

    def _check_unscaled_until(self, losses: list[Loss], start: cst.CSTNode, step: cst.Call) -> None:
        """Require that nothing but the step follows after gradients are unscaled."""
        for node in [*self.jumps, *(loss.statement for loss in losses)]:
            is_here = self.function(node) is self.function(start) is self.function(step)
            if not is_here or not self.line(start) < self.line(node) < self.line(step):
                continue
            if self.are_branches(start, step):
                continue
            if isinstance(node, cst.With):
                why = "gradients are clipped between two backward passes"
            elif isinstance(node, cst.Return) or self.loop(node) in {*self.parents(step)}:
                why = "step() may not follow after gradients are clipped"
            else:
                continue
            self.usage.reasons.append(why)
