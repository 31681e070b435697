"""Order of the calls of GradScaler: created, scale, unscale_, step and update.

A step, its backward pass and the zeroing of its gradients are in the same function, except for a
backward pass in a function that is called there.
"""

import re
from itertools import combinations
from typing import Any

import libcst as cst
from libcst.metadata import PositionProvider

from .exceptions import Exceptions
from .gradients import LATER, function_name
from .places import as_bool, is_own, plain_source, source

# Around a call that may run later, or not.
INDIRECT = (*LATER, cst.IfExp, cst.BooleanOperation)


def negated(test: cst.BaseExpression) -> cst.BaseExpression:
    """Return the opposite of a condition."""
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        return test.expression
    return cst.parse_expression(f"not ({source(test)})")


def parts(test: cst.BaseExpression, holds: bool) -> set[tuple[str, bool]]:
    """Return what is known where a test holds or does not: of "a and b", both parts."""
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        return parts(test.expression, not holds)
    if holds and isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And):
        return parts(test.left, True) | parts(test.right, True)
    return {(source(test).strip("()"), holds)}


class Order(Exceptions):
    """Checks of the order in which a run of the script calls GradScaler's methods."""

    def __init__(self) -> None:
        super().__init__()
        self.flags: set[str] = set()
        # Where the gradients of an optimizer are unscaled: from a line to a step.
        self.windows: list[tuple[str, int, cst.Call]] = []
        # Where they may be scaled, if not right before that alone: the line of the first backward
        # pass, a step, and whether it may not follow, so that gradients accumulate.
        self.exposed: dict[str, list[tuple[int, cst.Call, bool]]] = {}

    def is_of_amp(self, test: cst.BaseExpression | bool) -> bool:
        """Return whether a simplified condition is the one of ``amp.initialize``."""
        return not isinstance(test, bool) and as_bool(test, self.flags) == self.usage.condition

    def block(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return the block of the statement that contains `node`."""
        block: cst.CSTNode = next(self.levels(self.statement(node)))[0]
        return block

    def place_scalers(self) -> None:
        """Require that scalers, which are created where amp is initialized, are not used elsewhere.

        Before it, or outside of an ``if`` around it, they do not exist.
        """
        users = self.users()
        here = self.function(self.starts[0])
        self.usage.is_global = (
            isinstance(here, cst.FunctionDef)
            and not all(name.startswith("self.") for name in self.usage.scalers.values())
            and any(self.function(node) is not here for node in users)
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

    def check_order(self) -> None:
        """Require backward passes in front of each step, and gradients that are zeroed."""
        for optimizer in self.usage.scalers:
            steps = self.steps_of(optimizer)
            self._check_steps(optimizer, steps)
            places = self._places(optimizer, {self.function(step) for step in steps})
            for step in steps:
                before = self._before(optimizer, step, places)
                if before:
                    begin = self._begin(step, before)
                    self._place_unscale(optimizer, step, before, begin)
                    self._check_zeroed(optimizer, step, begin)
        for loss in self.usage.losses:  # in the block, gradients are still scaled with Apex
            body = loss.statement.body.body
            if len(body) > 1 or not plain_source(body[0]).startswith(f"{loss.alias}.backward("):
                self.usage.reasons.append(
                    f"the block of amp.scale_loss is not {loss.alias}.backward() alone"
                )

    def _check_steps(self, optimizer: str, steps: list[cst.Call]) -> None:
        """Require one step in a function, as a statement, whose exceptions nothing catches."""
        reasons = self.usage.reasons
        is_several = any(
            self.function(one) is self.function(other) and not self.are_branches(one, other)
            for one, other in combinations(steps, 2)
        )
        if not steps or is_several:
            reasons.append(f"GradScaler needs one {optimizer}.step() in this file")
        for step in steps:
            line = self.statement(step)
            is_alone = isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1
            if step.args or not is_alone or not isinstance(self.parent(step), cst.Expr):
                reasons.append(f"{optimizer}.step() is not a statement of its own")
        pauses = [each for each in self.jumps if isinstance(each, (cst.Yield, cst.Await))]
        if {self.function(each) for each in pauses} & {self.function(step) for step in steps}:
            reasons.append(f"{optimizer}.step() is in a generator or a coroutine")
        nodes: list[tuple[str, Any]] = [("step", step) for step in steps]
        nodes += [("backward", loss.statement) for loss in self.losses_of(optimizer)]
        for name, node in nodes:
            if self.is_caught(node):
                reasons.append(
                    f"an exception at {optimizer}.{name}() may be caught, after which GradScaler "
                    "would not unscale the gradients of the next step"
                )

    def _places(self, optimizer: str, functions: set[cst.CSTNode]) -> list[cst.CSTNode]:
        """Return the backward passes in the functions of the steps, or calls there that lead to it.

        No other calls may lead to it, and all must be given the optimizer of this name.
        """
        found: list[cst.CSTNode] = []
        for loss in self.losses_of(optimizer):
            here = self.function(loss.statement)
            calls = [
                call
                for name, call in self.calls
                if name == function_name(here) and (name != "backward" or is_own(name, call))
            ]
            if here in functions:
                found.append(loss.statement)
            elif self._is_known(here, calls, optimizer) and (
                {self.function(call) for call in calls} <= functions
            ):
                found += [call for call in calls if call not in found]
            else:
                self.usage.reasons.append(
                    f"{optimizer}.step() is in another function than its backward pass"
                )
        return found

    def _is_known(self, function: cst.CSTNode, calls: list[cst.Call], optimizer: str) -> bool:
        """Return whether these are all calls of a function, with an optimizer under its name."""
        name = function_name(function)
        is_one = len(self.defined.get(name, ())) == 1 and bool(calls) and name not in self.values
        params = source(function.params) if isinstance(function, cst.FunctionDef) else ""
        is_given = bool(re.search(rf"\b{re.escape(optimizer)}\b", params))
        return is_one and all(
            is_own(name, call)
            and not any(isinstance(each, INDIRECT) for each in self.parents(call))
            and (not is_given or optimizer in [source(arg.value) for arg in call.args])
            for call in calls
        )

    def _before(
        self, optimizer: str, step: cst.Call, places: list[cst.CSTNode]
    ) -> list[cst.CSTNode]:
        """Return the backward passes of a step, or nothing if it is in a branch without amp."""
        here = [each for each in places if self.function(each) is self.function(step)]
        before = [each for each in here if not self.are_branches(each, step)]
        reasons, around = self.usage.reasons, {*self.parents(step)}
        if here and not before and ".backward(" in plain_source(self.block(step)):
            return []
        if any(self.line(each) > self.line(step) for each in before):
            reasons.append(f"{optimizer}.step() is in front of its backward pass")
        if any({*self.loops(step)} - {*self.parents(each)} for each in before):
            reasons.append(f"{optimizer}.step() is in a loop without its backward pass")
        is_final = any(isinstance(each, cst.Finally) for each in around)
        if is_final or all(self._may_be_skipped(each, step, optimizer) for each in before):
            reasons.append(f"{optimizer}.step() lacks the condition of its backward pass")
        return before

    def _may_be_skipped(self, place: cst.CSTNode, step: cst.Call, optimizer: str) -> bool:
        """Return whether a backward pass has a condition or a jump in front, where the step runs.

        Also in a function that has it.
        """
        around = {*self.parents(step)}
        known = {test for each, holds in self.conditions(step) for test in parts(each.test, holds)}
        for each, holds in self.conditions(place):
            other = each.orelse if holds else each.body
            test = self.simplified(each.test if holds else negated(each.test))
            if isinstance(test, bool) or self.is_of_amp(test) or parts(each.test, holds) <= known:
                continue
            if other is None or ".backward(" not in plain_source(other):
                return True
        inner = {*self.parents(place)} - around
        if any(isinstance(each, cst.MatchCase) for each in inner) or any(
            self.line(jump) < self.line(place) and self._left(jump) in inner for jump in self.jumps
        ):
            return True
        losses = [one.statement for one in self.losses_of(optimizer)]
        inside = [one for one in losses if place in self.callers(one)]
        return bool(inside) and all(self._may_be_skipped(one, step, optimizer) for one in inside)

    def _left(self, jump: cst.CSTNode) -> cst.CSTNode | None:
        """Return the loop or function that a jump leaves."""
        is_of_loop = isinstance(jump, (cst.Break, cst.Continue))
        return self.loop(jump) if is_of_loop else self.function(jump)

    def _jumps(self, start: cst.CSTNode, end: cst.CSTNode) -> list[cst.CSTNode]:
        """Return the jumps after a node that leave out another one below it."""
        return [
            jump
            for jump in self.jumps
            if self.function(jump) is self.function(end)
            and self.line(start) < self.line(jump) < self.line(end)
            and not self.are_branches(start, jump)
            and self._left(jump) in {*self.parents(end)}
        ]

    def _begin(self, step: cst.Call, before: list[cst.CSTNode]) -> int:
        """Return the line from which gradients may be scaled: of the first backward pass.

        Or of a loop around it alone.
        """
        starts = {each for one in before for each in (one, *self.loops(one))}
        return min(self.line(each) for each in starts - {*self.loops(step)})

    def _place_unscale(
        self, optimizer: str, step: cst.Call, before: list[cst.CSTNode], begin: int
    ) -> None:
        """Unscale gradients where Apex does: after the backward pass, if one step always follows.

        Else in the block of the step, after all backward passes and jumps that it has.
        """
        always = [
            self.block(step) in {*self.parents(each)} and not self._jumps(each, step)
            for each in before
        ]
        losses = {loss.statement for loss in self.usage.losses} & {*before}
        is_alone = all(
            self.loops(each) == self.loops(step)
            and all(self.are_branches(each, one) for one in before if one is not each)
            for each in before
        )
        if all(always) and len(losses) == len(before) and is_alone:
            for loss in losses:
                end = self.get_metadata(PositionProvider, loss).end.line
                self.windows.append((optimizer, end + 1, step))
                if not self._is_next(loss, step):
                    self.usage.unscaled.add(loss)
            return
        self.exposed.setdefault(optimizer, []).append((begin, step, not all(always)))
        block, end = next(self.levels(self.statement(step)))
        last = [*before, *(jump for each in before for jump in self._jumps(each, step))]
        done = {each for node in last for each in (node, *self.parents(node))}
        index = max((n + 1 for n, line in enumerate(block.body[:end]) if line in done), default=0)
        if index < end:
            self.usage.unscale.setdefault(block.body[index], []).append(optimizer)
            self.windows.append((optimizer, self.line(block.body[index]), step))

    def _is_next(self, loss: cst.CSTNode, step: cst.Call) -> bool:
        """Return whether a step is the next statement after a backward pass, also behind an if."""
        for block, index in self.levels(loss):
            rest = block.body[index + 1 :]
            if rest or not isinstance(self.parent(block), (cst.If, cst.Else)):
                return bool(rest) and rest[0] is self.statement(step)
        return False

    def is_unscaled(self, node: cst.CSTNode, optimizer: str) -> bool:
        """Return whether the gradients of an optimizer are unscaled at a node, before the step."""
        return any(
            owner == optimizer
            and self.function(node) is self.function(step)
            and first <= self.line(node) < self.line(step)
            for owner, first, step in self.windows
        )

    def _check_zeroed(self, optimizer: str, step: cst.Call, begin: int) -> None:
        """Require that gradients, which a step unscales, are zeroed before others are added.

        In the block of the step, or around it in the same loop, and not in front of the step.
        """
        resets = [
            (owner, reset)
            for owner, reset in self.resets
            if self.function(reset) is self.function(step)
        ]
        zeroed = [
            reset
            for owner, reset in resets
            if self.is_zeroed_by(optimizer, owner)
            and isinstance(self.parent(reset), cst.Expr)
            and isinstance(self.statement(reset), cst.SimpleStatementLine)
            and self.loop(reset) is self.loop(step)
            and self.block(reset) in {*self.parents(step)}
            and not self._jumps(step, reset)
        ]
        if not zeroed:
            self.usage.reasons.append(
                f"gradients may not be zeroed between one {optimizer}.step() and the next"
            )
        self._check_others(optimizer, step, begin, [self.line(each) for each in zeroed])
        others = {*self.usage.scalers} - {optimizer}
        if any(
            begin <= self.line(reset) < self.line(step)
            and not self.is_unscaled(reset, optimizer)
            and not any(self.is_zeroed_by(other, owner) for other in others)
            for owner, reset in resets
        ):
            self.usage.reasons.append(f"gradients may be zeroed before {optimizer}.step()")

    def _check_others(self, optimizer: str, step: cst.Call, begin: int, zeroed: list[int]) -> None:
        """Require that no loss of another optimizer runs between zeroing and the step.

        It may add to the gradients of parameters that both have.
        """
        last = max((line for line in zeroed if line < begin), default=0)
        for other in {*self.usage.scalers} - {optimizer}:
            losses = self.leading(loss.statement for loss in self.losses_of(other))
            here = [each for each in losses if self.function(each) is self.function(step)]
            if not last or any(last < self.line(each) < self.line(step) for each in here):
                self.usage.reasons.append(
                    f"the loss of {other} may come between {optimizer}.zero_grad() and its step()"
                )
