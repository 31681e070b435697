"""Order of the calls of GradScaler: created, scale, unscale_, step and update."""

import re
from itertools import combinations, product
from typing import Any

import libcst as cst
from libcst.metadata import PositionProvider

from .gradients import Gradients, decorators, function_name
from .places import as_bool, is_own, names_in, plain_source, source
from .tree import LOOPS
from .usage import Loss

ENDS = re.compile(r"^raise\b|exit\(")  # the last statement of a handler that ends the script
CATCHING = re.compile("retry|backoff|catch|suppress", re.IGNORECASE)  # decorators of other files
WORD = re.compile(r"[A-Za-z_]\w*(?:\.\w+|\[\w+\])*")  # a name, also with attributes and indices
PARAMETERS_OF = re.compile(rf"({WORD.pattern})\.(?:named_)?parameters\(\)")
# In a context manager that lets exceptions pass.
PASSING = re.compile(
    r"\b(torch|amp|scale_loss|open)\b|tqdm|range|no_sync|autocast|null|prof|record|time|grad|log|bar",
    re.IGNORECASE,
)
LEAVES = re.compile(r"^(raise|continue|break|return)\b|exit\(")


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


class Order(Gradients):
    """Checks that each run of the script calls GradScaler's methods in the order it requires."""

    def __init__(self) -> None:
        super().__init__()
        self.flags: set[str] = set()

    def is_of_amp(self, test: cst.BaseExpression | bool) -> bool:
        """Return whether a simplified condition is the one of ``amp.initialize``."""
        return not isinstance(test, bool) and as_bool(test, self.flags) == self.usage.condition

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

    def place_unscale(self) -> None:
        """Unscale gradients where Apex does: after the backward pass, if one step always follows.

        Else in the block of the step, where nothing prevents it.
        """
        for optimizer in self.usage.scalers:
            losses = [loss.statement for loss in self.losses_of(optimizer)]
            steps = [self._only_step_after(loss, optimizer, losses) for loss in losses]
            windows = self.windows.setdefault(optimizer, [])
            for loss, step in zip(losses, steps, strict=True) if all(steps) else ():
                assert step is not None
                windows.append((self.get_metadata(PositionProvider, loss).end.line + 1, step))
                if not self._is_next(loss, step):
                    self.usage.unscaled.add(loss)
            if not all(steps):
                self.exposed[optimizer] = not self.is_stepped_at_once(optimizer)
                for each in self.steps_of(optimizer):
                    self._unscale_in_block(optimizer, each, losses)

    def is_stepped_at_once(self, optimizer: str) -> bool:
        """Return whether a step always follows each backward pass in its function."""
        steps = self.steps_of(optimizer)
        losses = [each.statement for each in self.losses_of(optimizer)]
        return all(any(self._is_stepped_after(loss, step) for step in steps) for loss in losses)

    def _is_stepped_after(self, loss: cst.CSTNode, step: cst.Call) -> bool:
        around = {*self.loops(step), *self.catching(step, ENDS)}
        is_here = self.function(loss) is self.function(step) and around <= {*self.parents(loss)}
        return is_here and self.follows_always(step, loss) and not self._jumps(loss, step)

    def _jumps(self, start: cst.CSTNode, step: cst.Call) -> list[cst.CSTNode]:
        """Return the jumps after a statement that leave out the step below it."""
        return [
            jump
            for jump in self.jumps
            if self.function(jump) is self.function(step)
            and self.line(start) < self.line(jump) < self.line(step)
            and not self.are_branches(start, jump)
            and not (
                isinstance(jump, (cst.Break, cst.Continue))
                and self.loop(jump) not in {*self.parents(step)}
            )
        ]

    def _only_step_after(
        self, loss: cst.CSTNode, optimizer: str, losses: list[Any]
    ) -> cst.Call | None:
        """Return the step that always follows a backward pass, once and before another, or None."""
        steps = [each for each in self.steps_of(optimizer) if self._is_stepped_after(loss, each)]
        if len(steps) != 1 or self.loops(loss) != self.loops(steps[0]):
            return None
        others = [
            each
            for each in self.beside(loss, losses)
            if self.line(loss) < self.line(each) < self.line(steps[0])
            and not self.are_branches(loss, each)
        ]
        return None if others or self._is_caught(loss) else steps[0]

    def _is_next(self, loss: cst.CSTNode, step: cst.Call) -> bool:
        """Return whether a step is the next statement after a backward pass, also behind an if."""
        for block, index in self.levels(loss):
            rest = block.body[index + 1 :]
            if rest or not isinstance(self.parent(block), (cst.If, cst.Else)):
                return bool(rest) and rest[0] is self.statement(step)
        return False

    def _unscale_in_block(self, optimizer: str, step: cst.Call, losses: list[Any]) -> None:
        """Unscale in the block of a step, after all backward passes and jumps that it has.

        If the backward passes are in other functions, unscale in front of what clips gradients.
        """
        block, end = next(iter(self.levels(self.statement(step))))
        places = self.beside(step, losses)
        before = [
            each
            for each in places
            if self.line(each) < self.line(step) and not self.are_branches(each, step)
        ]
        if places and not before:
            return
        starts = before or list(block.body[:1])
        last = [*before, *(jump for start in starts for jump in self._jumps(start, step))]
        done = {each for node in last for each in (node, *self.parents(node))}
        index = max((n + 1 for n, line in enumerate(block.body[:end]) if line in done), default=0)
        if not {*before} & {*losses}:
            clips = [node for node, grad in self.readers if not grad]
            clips += [each for node in clips for each in self.parents(node)]
            index = next((n for n in range(index, end) if block.body[n] in clips), end)
        if index < end:
            self.usage.unscale.setdefault(block.body[index], []).append(optimizer)
            self.windows[optimizer].append((self.line(block.body[index]), step))

    def check_order(self) -> None:
        """Require a backward pass in front of each step, as often, for each optimizer."""
        for optimizer in self.usage.scalers:
            losses = self.losses_of(optimizer)
            for step in self.steps_of(optimizer):
                self._check_backward(optimizer, losses, step)
                self._check_loop(optimizer, losses, step)
                if self._is_caught(step):
                    self.usage.reasons.append(
                        f"an exception at {optimizer}.step() may be caught, after which GradScaler "
                        "would not unscale the gradients of the next step"
                    )
        for pair in combinations(self.usage.scalers, 2):
            self._check_shared(pair)

    def check_zeroed(self) -> None:
        """Require that gradients, which a step unscales, are zeroed before others are added."""
        for optimizer, step in self.steps:
            if optimizer not in self.usage.scalers:
                continue
            if not self._is_zeroed(optimizer, step):
                self.usage.reasons.append(
                    f"gradients may not be zeroed between one {optimizer}.step() and the next"
                )
            if self._is_zeroed_before(optimizer, step):
                self.usage.reasons.append(f"gradients may be zeroed before {optimizer}.step()")

    def _is_zeroed_before(self, optimizer: str, step: cst.Call) -> bool:
        """Return whether GradScaler may find no gradients at a step: they are zeroed, and it runs.

        Gradients that are already unscaled may be zeroed.
        """
        others = {*self.usage.scalers} - {optimizer}
        return optimizer in self.exposed and any(
            self._is_between(place, optimizer, step)
            for owner, reset in self.resets
            if owner not in others
            for place in (reset, *self.beside(step, [reset]))
        )

    def _is_between(self, reset: cst.CSTNode, optimizer: str, step: cst.Call) -> bool:
        """Return whether a reset is between a backward pass and the step, which runs then.

        The step may be in the same function, in one that it calls, or in its caller.
        """
        line = self.line(reset)
        losses = self.beside(reset, [one.statement for one in self.losses_of(optimizer)])
        starts = [self.line(one) for one in losses if self.line(one) < line]
        steps = self.beside(reset, [step])
        after = [one for one in steps if line < self.line(one)]
        if not starts or (steps and all(self.are_branches(reset, one) for one in after)):
            return False
        last = next(block.body[-1] for block, _ in self.levels(self.statement(reset)))
        leaves = LEAVES if steps else ENDS
        return not leaves.search(plain_source(last)) and not self.is_unscaled(reset, optimizer)

    def _is_zeroed(self, optimizer: str, step: cst.Call) -> bool:
        """Return whether gradients are zeroed as often as an optimizer is stepped.

        In the loop of the step and under no more conditions, also by functions called there.
        """
        losses = [loss.statement for loss in self.losses_of(optimizer)]
        resets = [
            place
            for owner, reset in self.resets
            if self._is_owner(owner, optimizer)
            for place in self._run_always(reset)
        ]
        for place in self.leading([step]):
            nodes = [step, place, *losses]
            ifs = [each for node in nodes for each in self.conditions(node)]
            known = set().union(
                *map(self.tests, nodes), *(parts(one.test, yes) for one, yes in ifs)
            )
            here = [each for each in resets if self.function(each) is self.function(place)]
            added = {each: self.tests(each) - known for each in here}
            for reset, more in added.items():
                is_rare = (
                    bool(more) and {(test, not holds) for test, holds in more} not in added.values()
                )
                is_rare |= self._is_left_out(reset, place)
                if {*self.loops(place)} <= {*self.parents(reset)} and not is_rare:
                    return True
        return False

    def _is_owner(self, owner: str, optimizer: str) -> bool:
        """Return whether ``owner.zero_grad()`` zeroes the gradients of an optimizer."""
        others = [self._modules(other) for other in self.usage.scalers if other != optimizer]
        is_model = bool({owner, owner.split(".")[-1]} & (self.models | self._modules(optimizer)))
        return owner == optimizer or is_model and owner not in set().union(*others)

    def _run_always(self, node: cst.CSTNode) -> list[cst.CSTNode]:
        """Return a node, and the calls of functions in which it runs each time."""
        found = [node]
        for each in found:
            jumps = [one for one in self.jumps if self.function(one) is self.function(each)]
            if not self.tests(each) and all(self.line(one) > self.line(each) for one in jumps):
                found += [call for call in self.callers(each) if call not in found]
        return found

    def _is_left_out(self, reset: cst.CSTNode, step: cst.CSTNode) -> bool:
        """Return whether a jump between a step and a reset leaves it out."""
        return any(
            self._leaves(jump) in {*self.parents(reset)}
            and self.line(step) < self.line(jump) < self.line(reset)
            for jump in self.jumps
        )

    def _check_shared(self, pair: tuple[str, str]) -> None:
        """Require that two optimizers have no parameters in common.

        The step of each would unscale the gradients that the other one leaves.
        """
        one, other = map(self._modules, pair)
        both = [*product(one, other), *product(other, one)]
        is_shared = any(f"{part}.".startswith(f"{whole}.") for part, whole in both)
        if is_shared or not one or not other:
            self.usage.reasons.append(
                f"{pair[0]} and {pair[1]} may share parameters, whose gradients both would unscale"
            )

    def _modules(self, optimizer: str) -> set[str]:
        """Return the modules from which an optimizer is created, also by way of other names."""
        names, found = [optimizer], set()
        for name in names:
            values = [value for target, value in self.assigned if source(target) == name]
            code = " ".join(map(plain_source, values))
            given = {*PARAMETERS_OF.findall(code)}
            words = {*WORD.findall(code)} | given
            found |= given | {each for each in words if each.split(".")[-1] in self.models}
            names += words - {*names}
        return found

    def _check_backward(self, optimizer: str, losses: list[Loss], step: cst.Call) -> None:
        """Require a backward pass before each step, which fails without gradients."""
        places = self.beside(step, [loss.statement for loss in losses])
        later = [each for each in places if self.line(each) > self.line(step)]
        if places and len(later) == len(places) and not self.are_branches(step, later[0]):
            self.usage.reasons.append(f"{optimizer}.step() is in front of its backward pass")
        for group in (places, [loss.statement for loss in losses]):
            if group and all(self._may_be_skipped(place, step) for place in group):
                self.usage.reasons.append(
                    f"{optimizer}.step() lacks the condition of its backward pass"
                )

    def _may_be_skipped(self, place: cst.CSTNode, step: cst.Call) -> bool:
        """Return whether a backward pass has a condition, or may be left, where the step runs."""
        if {*self.catching(place, LEAVES)} - {*self.parents(step)} or self._is_passed(place, step):
            return True
        known = {test for each, holds in self.conditions(step) for test in parts(each.test, holds)}
        for each, holds in self.conditions(place):
            other = each.orelse if holds else each.body
            test = self.simplified(each.test if holds else negated(each.test))
            if isinstance(test, bool) or self.is_of_amp(test) or parts(each.test, holds) <= known:
                continue
            if other is None or "backward" not in plain_source(other):
                return True
        return False

    def _is_passed(self, place: cst.CSTNode, step: cst.Call) -> bool:
        """Return whether a step may follow without a backward pass, which is not in an ``if``.

        After a jump in front of it, as the next case of a match, or in ``finally``.
        """
        steps = self.beside(place, [step]) or [step]
        around = {each for one in steps for each in self.parents(one)}
        inner = {*self.parents(place)} - around
        is_case = any(isinstance(each, cst.MatchCase) for each in inner)
        final = [self.parent(each) for each in around if isinstance(each, cst.Finally)]
        return (
            is_case
            or any(getattr(each, "body", None) in inner for each in final)
            or any(
                self._leaves(jump) in inner and self.line(jump) < self.line(place)
                for jump in self.jumps
            )
        )

    def _leaves(self, jump: cst.CSTNode) -> cst.CSTNode | None:
        """Return the loop or function that a jump without a backward pass in front leaves."""
        is_in_loop = isinstance(jump, (cst.Break, cst.Continue))
        left = self.loop(jump) if is_in_loop else self.function(jump)
        for each, holds in self.conditions(jump):
            branch = each.body if holds else each.orelse
            if left in {*self.parents(each)} and branch and "backward" in plain_source(branch):
                return None
        return left if is_in_loop or isinstance(jump, cst.Return) else None

    def _check_loop(self, optimizer: str, losses: list[Loss], step: cst.Call) -> None:
        """Require one step for each backward pass."""
        places = self.beside(step, [loss.statement for loss in losses])
        around = {each for place in places for each in self.parents(place)}
        if places and not {self.loop(step)} <= {None, *around}:
            self.usage.reasons.append(f"{optimizer}.step() is in a loop without its backward pass")

    def _is_caught(self, node: cst.CSTNode) -> bool:
        """Return whether an exception at a node may be caught in a loop, which continues."""
        calls: list[tuple[cst.CSTNode, bool]] = [(node, False)]
        for call, is_caught in calls:  # and the calls of the function, and of its callers
            catching = self.catching(call, ENDS)
            for each in self.parents(call):
                is_caught |= each in catching
                if is_caught and isinstance(each, LOOPS):
                    return True
            here = self.function(call)
            name = function_name(here)
            is_caught |= any(
                CATCHING.search(each) or each.partition("(")[0] in self.handling
                for each in decorators(here)
            )
            is_method = self.owner(here) is not here
            callers = [
                other
                for called, other in self.calls
                if called == name and (is_method or is_own(name, other))
            ]
            if is_caught and not callers and name:
                return True  # it may be called in a loop of another file
            calls += [(one, is_caught) for one in callers if (one, is_caught) not in calls]
        return False

    def catching(self, node: cst.CSTNode, leaving: re.Pattern[str]) -> list[cst.CSTNode]:
        """Return the statements around a node that catch exceptions, after which others follow.

        Unless the last statement of each handler matches `leaving`.
        """
        path = [node, *self.parents(node)]
        return [
            each
            for each in path
            if isinstance(each, (cst.Try, cst.TryStar))
            and each.body in path
            and not all(leaving.search(plain_source(one.body.body[-1])) for one in each.handlers)
            or isinstance(each, cst.With)
            and not all(self._passes(one.item) for one in each.items)
        ]

    def _passes(self, manager: cst.BaseExpression) -> bool:
        """Return whether a context manager lets exceptions pass, by its name or definition."""
        names = names_in(manager)
        is_known = names & {*self.defined, *self.classes} or PASSING.search(plain_source(manager))
        return bool(is_known) and not names & self.suppressing
