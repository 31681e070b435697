"""Uses of amp in a script, and whether all of them can be expressed in torch.

amp is rewritten as a whole or not at all: its calls depend on each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst.metadata import ParentNodeProvider, QualifiedNameProvider

from .calls import split

HANDLED = ("initialize", "scale_loss", "master_params", "state_dict", "load_state_dict")
NO_MASTERS = "O2, O3 and O5 cast the model; --opt-level O1 or O4 replaces them by autocast"


def source(node: cst.CSTNode) -> str:
    """Return the source code of `node`."""
    return cst.Module(body=[]).code_for_node(node)


@dataclass
class Usage:
    """Facts about amp in a script. It stays unchanged if there is a reason in `reasons`."""

    level: str = ""
    reasons: list[str] = field(default_factory=list)
    optimizers: set[str] = field(default_factory=set)
    steps: int = 0
    master_params: int = 0

    @property
    def scaled(self) -> bool:
        """Return whether the losses are scaled, as at O1."""
        return self.level == "O1"

    def autocast(self) -> str:
        """Return the expression of the context manager for forward passes."""
        if self.scaled:
            return 'torch.autocast("cuda", torch.float16)'
        device = '"cuda" if torch.cuda.is_available() else "cpu"'
        return f"torch.autocast({device}, torch.bfloat16)"


class Analysis(cst.CSTVisitor):
    """Collects `usage` from a module."""

    METADATA_DEPENDENCIES = (QualifiedNameProvider, ParentNodeProvider)

    def __init__(self, level: str = "") -> None:
        super().__init__()
        self.level = level  # in place of the script's
        self.usage = Usage()
        self.step_targets: list[str] = []
        self.elsewhere = False
        self.has_scaler = False

    def visit_Call(self, node: cst.Call) -> None:
        names = {each.name for each in self.get_metadata(QualifiedNameProvider, node.func, set())}
        name = next(iter(names), "")
        if isinstance(node.func, cst.Attribute) and node.func.attr.value == "step":
            self.step_targets.append(source(node.func.value))
        if not name.startswith("apex.amp."):
            return
        short = name.removeprefix("apex.amp.")
        if len(names) > 1 or short not in HANDLED:
            self.usage.reasons.append(f"amp.{short} has no equivalent here")
        elif short == "initialize":
            self._initialize(node)
        elif short == "scale_loss":
            self._scale_loss(node)
        elif short == "master_params":
            self.usage.master_params += 1

    def _initialize(self, node: cst.Call) -> None:
        usage, parts = self.usage, split(node)
        if usage.level:
            usage.reasons.append("amp.initialize is called more than once")
        if isinstance(parts, str):
            usage.reasons.append(parts)
            return
        positional, keywords = parts
        stated = keywords.get("opt_level")
        level = self.level or (source(stated.value).strip("\"'") if stated else "O1")
        usage.level = level
        if level in ("O2", "O3", "O5"):
            usage.reasons.append(NO_MASTERS)
        elif level not in ("O0", "O1", "O4"):
            usage.reasons.append(
                f"opt_level is {level}, known only when the script runs; give --opt-level"
            )
        other = set(keywords) - {"opt_level", "verbosity", "models", "optimizers", "loss_scale"}
        other.discard("keep_batchnorm_fp32")  # must be None where weights are not cast
        if "loss_scale" in keywords and "dynamic" not in source(keywords["loss_scale"].value):
            other.add("loss_scale")
        if other or not 1 <= len(positional) <= 2 or {"models", "optimizers"} & set(keywords):
            usage.reasons.append(f"amp.initialize has arguments of its own: {sorted(other)}")
        if len(positional) == 2:
            self._add_optimizer(positional[1].value)
        self._check_place(node)

    def _add_optimizer(self, node: cst.BaseExpression) -> None:
        self.usage.optimizers.add(source(node))

    def _check_place(self, node: cst.CSTNode) -> None:
        """Require an assignment or a statement that always runs."""
        parent = self.get_metadata(ParentNodeProvider, node)
        if not isinstance(parent, (cst.Assign, cst.Expr)):
            self.usage.reasons.append("amp.initialize is part of an expression")
        while not isinstance(parent, (cst.Module, cst.FunctionDef)):
            if isinstance(parent, cst.If) and "__name__" not in source(parent.test):
                self.usage.reasons.append("amp.initialize is conditional")
            if isinstance(parent, (cst.For, cst.While, cst.Try)):
                self.usage.reasons.append("amp.initialize is in a loop or a try")
            parent = self.get_metadata(ParentNodeProvider, parent)

    def _scale_loss(self, node: cst.Call) -> None:
        item = self.get_metadata(ParentNodeProvider, node)
        parts = split(node)
        is_name = isinstance(item, cst.WithItem) and item.asname is not None
        if not is_name or isinstance(parts, str) or len(parts[0]) != 2:
            self.usage.reasons.append("amp.scale_loss is not of the form of Apex's documentation")
            return
        self._add_optimizer(parts[0][1].value)
        statement = self.get_metadata(ParentNodeProvider, item)
        assert isinstance(statement, cst.With)
        if len(statement.items) > 1 or not isinstance(statement.body, cst.IndentedBlock):
            self.usage.reasons.append("amp.scale_loss shares its statement with something else")
        self._check_forward(statement, parts[0][0].value)

    def _check_forward(self, statement: cst.With, loss: cst.BaseExpression) -> None:
        """Require the forward pass in the block of the backward pass."""
        block = self.get_metadata(ParentNodeProvider, statement)
        owner = self.get_metadata(ParentNodeProvider, block, None)
        loops = (cst.For, cst.While, cst.FunctionDef)
        is_block = isinstance(block, cst.Module) or isinstance(owner, loops)
        assert isinstance(block, cst.Module | cst.IndentedBlock)
        if not is_block or not forward_range(block.body, block.body.index(statement), loss):
            self.elsewhere = True

    def visit_Name(self, node: cst.Name) -> None:
        """Find a name that the rewritten script needs for itself."""
        self.has_scaler |= node.value == "scaler"

    def leave_Module(self, original_node: cst.Module) -> None:  # noqa: ARG002
        """Check what takes knowledge of the whole module."""
        usage = self.usage
        usage.steps = sum(name in usage.optimizers for name in self.step_targets)
        if not usage.level:
            usage.reasons.append("amp.initialize is not in this file")
        if usage.scaled and (len(usage.optimizers) != 1 or usage.steps != 1):
            usage.reasons.append("GradScaler needs one optimizer, with one step() in this file")
        if usage.level in ("O1", "O4") and self.elsewhere:
            usage.reasons.append("the loss is not computed in the block of its amp.scale_loss")
        if usage.scaled and self.has_scaler:
            usage.reasons.append("the script has a variable called scaler, GradScaler's name")
        if usage.scaled and usage.master_params > 1:
            usage.reasons.append("GradScaler unscales gradients once a step")


def names_in(node: cst.CSTNode) -> set[str]:
    """Return all names in `node`, and ``self.x`` as ``x``."""
    found: set[str] = set()

    class Names(cst.CSTVisitor):
        def visit_Name(self, node: cst.Name) -> None:
            found.add(node.value)

    node.visit(Names())
    return found - {"self"}


def assigned(node: cst.CSTNode) -> set[str]:
    """Return the names that a statement assigns, also in its blocks."""
    found: set[str] = set()

    class Targets(cst.CSTVisitor):
        def visit_AssignTarget(self, node: cst.AssignTarget) -> None:
            found.update(names_in(node.target))

        def visit_AugAssign(self, node: cst.AugAssign) -> None:
            found.update(names_in(node.target))

    node.visit(Targets())
    return found


def forward_range(body: Sequence[Any], end: int, loss: cst.BaseExpression) -> range:
    """Return the statements before `end` that compute `loss`, from the first to the last.

    The range is empty if the loss is computed elsewhere.
    """
    wanted, first, last = names_in(loss), end, end - 1
    for index in range(end - 1, -1, -1):
        line = body[index]
        targets = assigned(line)
        if targets & wanted and "(" in source(line):
            wanted |= names_in(line)
            first = index
    return range(first, last + 1)
