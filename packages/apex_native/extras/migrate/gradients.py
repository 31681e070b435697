"""Gradients: the steps of the optimizers, and where the gradients are unscaled before them."""

import re
from typing import Any

import libcst as cst
from libcst.metadata import PositionProvider

from .places import new_name, source
from .tree import Tree
from .usage import Loss, Usage


class Gradients(Tree):
    """Finds a place for the calls of GradScaler, in what a visit of the module has found."""

    def __init__(self) -> None:
        super().__init__()
        self.usage = Usage()
        self.steps: list[tuple[str, cst.Call]] = []
        self.readers: list[tuple[cst.CSTNode, str]] = []  # statements that read gradients
        self.states: list[cst.Call] = []
        self.calls: list[tuple[str, cst.Call]] = []  # of functions and methods, by name

    def name_scalers(self, module: cst.Module) -> None:
        """Name a GradScaler for each optimizer."""
        usage = self.usage
        optimizers = list(dict.fromkeys(loss.optimizer for loss in usage.losses))
        for optimizer in optimizers:
            suffix = "" if len(optimizers) == 1 else "_" + re.sub(r"\W+", "_", optimizer).strip("_")
            name = new_name(module, [f"scaler{suffix}", f"grad_scaler{suffix}"])
            usage.scalers[optimizer] = name
        if not optimizers:
            usage.reasons.append("amp.scale_loss is not in this file")
        if not all(usage.scalers.values()):
            usage.reasons.append("the script has variables called scaler and grad_scaler")
        if len(optimizers) > 1 and self.states:
            usage.reasons.append("amp.state_dict has one entry for several optimizers")
        first = next(iter(usage.scalers.values()), "")
        for lines in usage.autocast.values():
            for line, enabled in lines.items():
                lines[line] = enabled.replace("scaler.is_enabled", f"{first}.is_enabled")

    def check_steps(self) -> None:
        """Require one step for each backward pass, and gradients that are read only before it."""
        covered: set[cst.CSTNode] = set()
        for optimizer in self.usage.scalers:
            steps = [node for owner, node in self.steps if owner == optimizer]
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
        for loss in self.usage.losses:
            for statement, grad in self.readers:
                if not self._follows(statement, loss):
                    continue
                if grad:
                    self.usage.reasons.append(f"{grad} is read, which GradScaler keeps scaled")
                elif statement not in covered:
                    self.usage.reasons.append("gradients are clipped in another block than step()")
        self._check_helpers(covered)
        self._check_unscaled()

    def _check_helpers(self, covered: set[cst.CSTNode]) -> None:
        """Require that no function which a training step calls reads gradients.

        Methods of optimizers that the script defines are called by GradScaler, or after it.
        """
        for helper in {self.function(each) for each, _ in self.readers if each not in covered}:
            if not isinstance(helper, cst.FunctionDef):
                continue
            if helper.name.value in ("step", "zero_grad"):
                continue
            for name, call in self.calls:
                if name == helper.name.value and any(
                    self._follows(call, loss) for loss in self.usage.losses
                ):
                    self.usage.reasons.append(f"{name} reads gradients, which GradScaler scales")

    def _check_unscaled(self) -> None:
        """Require that all losses of a training step are scaled, or none."""
        losses = [loss.statement for loss in self.usage.losses]
        for name, call in self.calls:
            if name != "backward" or not isinstance(call.func, cst.Attribute):
                continue
            here = [each for each in losses if self.function(each) is self.function(call)]
            is_scaled = set(here) & {*self.parents(call)}
            if here and not is_scaled and not any(self._are_branches(call, one) for one in here):
                self.usage.reasons.append(
                    f"{source(call)} is not scaled; GradScaler would unscale its gradients, too, "
                    "if the same step uses them"
                )

    def _are_branches(self, one: cst.CSTNode, other: cst.CSTNode) -> bool:
        """Return whether two nodes of a function are in different branches of a condition."""
        around = set(self.parents(other))
        return isinstance(next(each for each in self.parents(one) if each in around), cst.If)

    def _exclude(self, one: cst.Call, other: cst.Call, optimizer: str) -> bool:
        """Return whether two steps never follow the same backward pass."""
        functions = {self.function(one), self.function(other)}
        if len(functions) > 1:
            losses = [loss for loss in self.usage.losses if loss.optimizer == optimizer]
            return functions <= {self.function(loss.statement) for loss in losses}
        return self._are_branches(one, other)

    def _follows(self, statement: cst.CSTNode, loss: Loss) -> bool:
        """Return whether a statement comes after a backward pass in the same function."""
        if self.function(statement) is not self.function(loss.statement):
            return False
        start = self.get_metadata(PositionProvider, statement).start.line
        return bool(start > self.get_metadata(PositionProvider, loss.statement).end.line)

    def _place_unscale(self, optimizer: str, step: cst.Call) -> set[cst.CSTNode]:
        """Unscale before gradients are read, and return the statements that read them."""
        block, end = next(iter(self.levels(self.statement(step))))
        covered: set[cst.CSTNode] = set()
        for statement, grad in self.readers:
            around = {statement, *self.parents(statement)}
            index = next((i for i, line in enumerate(block.body) if line in around), None)
            if grad or index is None:
                continue
            covered.add(statement)
            losses = [each for each in self.usage.losses if each.optimizer == optimizer]
            inside = [each for each in losses if block.body[index] in self.parents(each.statement)]
            before = block.body[: index + 1]
            if index > end or optimizer in self._unscaled(before):
                continue
            here = [each for each in losses if self.function(each.statement) is self.function(step)]
            if here and not any(self._follows(statement, each) for each in here):
                continue
            self.usage.unscale[statement if inside else block.body[index]] = optimizer
        return covered

    def _unscaled(self, lines: Any) -> set[str]:
        """Return the optimizers whose gradients these statements already unscale."""
        found = set()
        for statement, optimizer in self.usage.unscale.items():
            if {statement, *self.parents(statement)} & set(lines):
                found.add(optimizer)
        return found
