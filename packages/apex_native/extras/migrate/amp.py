"""Uses of amp in a script, and whether all of them can be expressed in torch.

amp is rewritten as a whole or not at all: its calls depend on each other.
"""

import re
from typing import Any

import libcst as cst
from libcst.metadata import PositionProvider, QualifiedNameProvider

from .calls import split
from .places import (
    apex_name,
    as_bool,
    availability_flags,
    forward_range,
    names_in,
    new_name,
    none_fallbacks,
    simplify,
    source,
)
from .tree import Tree
from .usage import Loss, Usage

HANDLED = ("initialize", "scale_loss", "master_params", "state_dict", "load_state_dict")
NO_MASTERS = "O2, O3 and O5 cast the model; --opt-level O1 or O4 replaces them by autocast"
IGNORED = {"opt_level", "verbosity", "models", "optimizers", "num_losses"}
IGNORED |= {"keep_batchnorm_fp32"}  # must be None where weights are not cast


def models_and_optimizers(call: cst.Call) -> list[cst.BaseExpression]:
    """Return what ``amp.initialize`` is given to prepare, by position or by keyword."""
    given = [arg.value for arg in call.args if arg.keyword is None]
    keywords = {arg.keyword.value: arg.value for arg in call.args if arg.keyword is not None}
    names = ("models", "optimizers")[len(given) :]
    return given + [keywords[name] for name in names if name in keywords]


class Analysis(Tree):
    """Collects `usage` from a module."""

    def __init__(self, level: str = "", loss_scale: str = "") -> None:
        super().__init__()
        self.level, self.loss_scale = level, loss_scale  # in place of the script's
        self.usage = Usage()
        self.start: cst.Call | None = None
        self.enabled: cst.BaseExpression | None = None
        self.flags: set[str] = set()
        self.steps: list[tuple[str, cst.Call]] = []
        self.readers: list[tuple[cst.CSTNode, str]] = []  # statements that read gradients
        self.states: list[cst.Call] = []

    def visit_Module(self, node: cst.Module) -> None:
        """Find names that stand for a failed import."""
        self.usage.fallbacks = none_fallbacks(node)
        self.usage.flags = availability_flags(node)

    def name(self, node: cst.CSTNode) -> str:
        """Return the name of Apex that `node` has, or ""."""
        return apex_name(
            self.get_metadata(QualifiedNameProvider, node, set()), self.usage.fallbacks
        )

    def visit_Call(self, node: cst.Call) -> None:
        name = self.name(node.func)
        attribute = node.func.attr.value if isinstance(node.func, cst.Attribute) else ""
        if attribute == "step" and isinstance(node.func, cst.Attribute):
            self.steps.append((source(node.func.value), node))
        elif attribute == "add_argument" and "store_true" in source(node):
            texts = [source(arg.value).strip("\"'") for arg in node.args if arg.keyword is None]
            self.flags |= {text.lstrip("-").replace("-", "_") for text in texts}
        elif "clip_grad" in source(node.func):
            self.readers.append((self.statement(node), ""))
        if not name.startswith("apex.amp."):
            return
        short = name.removeprefix("apex.amp.")
        if short not in HANDLED:
            self.usage.reasons.append(f"amp.{short} has no equivalent here")
        elif short == "initialize":
            self._initialize(node)
        elif short == "scale_loss":
            self._scale_loss(node)
        elif short == "master_params":
            self.readers.append((self.statement(node), ""))
        else:
            self.states.append(node)

    def visit_Attribute(self, node: cst.Attribute) -> None:
        """Find amp's state, which scripts read and set directly, and gradients."""
        if self.name(node) == "apex.amp._amp_state":
            self.usage.reasons.append("amp._amp_state has no equivalent here")
        parent = self.parent(node)
        is_reset = isinstance(parent, cst.AssignTarget) or source(parent).endswith(".grad.zero_")
        if node.attr.value == "grad" and not is_reset:
            self.readers.append((self.statement(node), source(node)))

    def _initialize(self, node: cst.Call) -> None:
        usage, parts = self.usage, split(node)
        if self.start:
            usage.reasons.append("amp.initialize is called more than once")
        self.start = node
        if isinstance(parts, str):
            usage.reasons.append(parts)
            return
        _, keywords = parts
        stated = keywords.get("opt_level")
        written = source(stated.value) if stated else "O1"
        usage.level = self.level or written.strip("\"'")
        if self.level and written.strip("\"'") == written != "O1":
            usage.ignored_level = written
        if usage.level in ("O2", "O3", "O5"):
            usage.reasons.append(NO_MASTERS)
        elif usage.level not in ("O0", "O1", "O4"):
            usage.reasons.append(
                f"opt_level is {usage.level}, known only when the script runs; "
                "give --opt-level O0, O1 or O4"
            )
        self._check_loss_scale(keywords)
        self.enabled = keywords["enabled"].value if "enabled" in keywords else None
        other = set(keywords) - IGNORED - {"loss_scale", "enabled"}
        if other or not 1 <= len(models_and_optimizers(node)) <= 2:
            usage.reasons.append(f"amp.initialize has arguments of its own: {sorted(other)}")

    def _check_loss_scale(self, keywords: dict[str, cst.Arg]) -> None:
        """Require a dynamic loss scale at O1, the only level with one."""
        if "loss_scale" not in keywords or not self.usage.scaled or self.loss_scale:
            return
        scale = source(keywords["loss_scale"].value)
        if scale.strip("\"'") not in ("dynamic", "None"):
            self.usage.reasons.append(
                f"loss_scale is {scale}; --loss-scale dynamic replaces it by GradScaler's"
            )

    def _scale_loss(self, node: cst.Call) -> None:
        item = self.parent(node)
        parts = split(node)
        is_name = isinstance(item, cst.WithItem) and item.asname is not None
        if not is_name or isinstance(parts, str) or len(parts[0]) not in (2, 3):
            self.usage.reasons.append("amp.scale_loss is not of the form of Apex's documentation")
            return
        statement = self.parent(item)
        assert isinstance(statement, cst.With)
        assert isinstance(item, cst.WithItem)
        assert item.asname is not None
        if len(statement.items) > 1 or not isinstance(statement.body, cst.IndentedBlock):
            self.usage.reasons.append("amp.scale_loss shares its statement with something else")
        if isinstance(parts[0][1].value, (cst.List, cst.Tuple)):
            self.usage.reasons.append("amp.scale_loss has several optimizers")
        value, optimizer = parts[0][0].value, source(parts[0][1].value)
        self.usage.losses.append(Loss(statement, value, source(item.asname.name), optimizer))

    def leave_Module(self, original_node: cst.Module) -> None:
        """Check what takes knowledge of the whole module."""
        usage = self.usage
        if not self.start:
            usage.reasons.append("amp.initialize is not in this file")
        if usage.reasons or self.start is None:
            return
        test = self._condition(self.start)
        if self.enabled and test:
            usage.reasons.append("amp.initialize is conditional, and has an argument enabled")
        test = test or self.enabled
        usage.condition = as_bool(test, self.flags) if test else ""
        for loss in usage.losses:
            self._add_autocast(loss)
        if usage.scaled and not usage.reasons:
            self._name_scalers(original_node)
            self._check_steps()
        users = [loss.statement for loss in usage.losses] + [node for _, node in self.steps]
        functions = {self.function(node) for node in (*users, *self.states)}
        here = self.function(self.start)
        usage.is_global = isinstance(here, cst.FunctionDef) and functions != {here}

    def _simplified(self, test: cst.BaseExpression) -> cst.BaseExpression | bool:
        return simplify(test, lambda node: self.usage.is_available(node, self.name(node)))

    def _condition(self, node: cst.Call) -> cst.BaseExpression | None:
        """Return the condition of ``amp.initialize`` which its uses do not share."""
        parent = self.parent(node)
        if not isinstance(parent, (cst.Assign, cst.Expr)):
            self.usage.reasons.append("amp.initialize is part of an expression")
        if any(isinstance(each, (cst.For, cst.While, cst.Try)) for each in self.parents(node)):
            self.usage.reasons.append("amp.initialize is in a loop or a try")
        self.usage.start = self.statement(node)
        found: list[cst.BaseExpression] = []
        for each, holds in self.conditions(node):
            shared = all(each in self.parents(loss.statement) for loss in self.usage.losses)
            test = self._simplified(each.test)
            if (shared and self.usage.losses) or "__name__" in source(each.test):
                continue
            if not holds or test is False or isinstance(self.parent(each), cst.If):
                self.usage.reasons.append("amp.initialize is in an else or an elif")
            elif not isinstance(test, bool):
                found.append(test)
                self.usage.start = each
        if len(found) > 1:
            self.usage.reasons.append("amp.initialize has more than one condition")
        return found[0] if found else None

    def _add_autocast(self, loss: Loss) -> None:
        """Record the statements that compute a loss, and the condition of autocast there."""
        usage, wanted = self.usage, names_in(loss.value)
        ranges = [
            (block, forward_range(block.body, index, wanted))
            for block, index in self.levels(loss.statement)
        ]
        enabled = self._enabled(loss, wanted) if usage.has_autocast else ""
        for block, lines in ranges:
            for line in lines:
                if usage.autocast.setdefault(block, {}).setdefault(line, enabled) != enabled:
                    usage.reasons.append("losses of the same statements have different conditions")
        if usage.has_autocast and not any(lines for _, lines in ranges):
            usage.reasons.append("the loss is not computed in the function of its amp.scale_loss")

    def _enabled(self, loss: Loss, computed: set[str]) -> str:
        """Return the condition of autocast, and merge branches that become equal.

        It must not depend on the names `computed` in the forward pass.
        """
        usage, same, own = self.usage, not self.usage.condition, ""
        for each, _ in self.conditions(loss.statement):
            test = self._simplified(each.test)
            is_same = not isinstance(test, bool) and as_bool(test, self.flags) == usage.condition
            same = same or is_same
            if each.orelse is None or ".backward(" not in source(each.orelse):
                continue
            if self._becomes_equal(each, loss):
                usage.merged.add(each)
                if not isinstance(test, bool) and not names_in(test) & computed:
                    own = own or as_bool(test, self.flags)
            elif not is_same and test is not True:
                usage.reasons.append(f"amp.initialize lacks the condition {source(each.test)}")
        if same:
            return usage.condition
        if not usage.scaled and not own:
            usage.reasons.append("amp.scale_loss lacks the condition of amp.initialize")
        return "scaler.is_enabled()" if usage.scaled else own

    def _becomes_equal(self, node: cst.If, loss: Loss) -> bool:
        """Return whether the other branch is the same backward pass without amp."""
        if [*node.body.body] != [loss.statement] or not isinstance(node.orelse, cst.Else):
            return False
        if isinstance(self.parent(node), cst.If):
            return False
        scaled = source(loss.statement.body).strip()
        value = source(loss.value)
        value = (
            value if value.isidentifier() or isinstance(loss.value, cst.Attribute) else f"({value})"
        )
        plain = re.sub(rf"\b{re.escape(loss.alias)}\b", lambda _: value, scaled)
        return plain == source(node.orelse.body).strip()

    def _name_scalers(self, module: cst.Module) -> None:
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

    def _check_steps(self) -> None:
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

    def _exclude(self, one: cst.Call, other: cst.Call, optimizer: str) -> bool:
        """Return whether two steps never follow the same backward pass."""
        functions = {self.function(one), self.function(other)}
        if len(functions) > 1:
            losses = [loss for loss in self.usage.losses if loss.optimizer == optimizer]
            return functions <= {self.function(loss.statement) for loss in losses}
        around = set(self.parents(other))
        return isinstance(next(each for each in self.parents(one) if each in around), cst.If)

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
