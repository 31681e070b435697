"""Facts about the steps of optimizers and their gradients, which a visit of the module finds."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import libcst as cst

from .places import is_own, source
from .tree import Tree
from .usage import Loss, Usage

# In the name of a class whose ``step`` GradScaler calls.
OPTIMIZER = re.compile(r"Optim|SGD|Adam|LAMB|LARS|LARC|Adagrad|NovoGrad|RMSprop|Rprop")
CLASS = re.compile(r"(^|\.)[A-Z]\w*$")
BRANCHES = (cst.MatchCase, cst.ExceptHandler, cst.ExceptStarHandler)
SCHEDULE = re.compile(
    r"LR|Lr[A-Z]|(^|\W|_)lr|[Ll]earning_?[Rr]ate|[Ss]ched|[Ww]arm|[Aa]nneal|[Cc]ycl"
)
LATER = (cst.Lambda, cst.GeneratorExp)  # what is in it may run after the function
Assignment = tuple[cst.BaseExpression, cst.BaseExpression]  # target, value


def function_name(function: cst.CSTNode) -> str:
    """Return the name of a function, or "" for a module."""
    return function.name.value if isinstance(function, cst.FunctionDef) else ""


def decorators(function: cst.CSTNode) -> list[cst.BaseExpression]:
    """Return the decorators of a function."""
    found = function.decorators if isinstance(function, cst.FunctionDef) else ()
    return [each.decorator for each in found]


class Gradients(Tree, cst.CSTVisitor):
    """Facts that a visit of the module has found."""

    def __init__(self) -> None:
        super().__init__(Usage())
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
        self.defined: defaultdict[str, list[cst.FunctionDef]] = defaultdict(list)  # functions
        self.classes: set[str] = set()  # of this file
        self.assigned: list[Assignment] = []
        self.loop_names: set[str] = set()  # targets of for loops
        self.models: set[str] = set()  # names of those that amp prepares
        self.has_value = False  # which reads gradients: a lambda, or a function that clips

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

    def values_of(self, name: str) -> list[cst.BaseExpression]:
        """Return what is assigned to a name."""
        return [value for target, value in self.assigned if source(target) == name]

    def callers(self, node: cst.CSTNode) -> list[cst.Call]:
        """Return the calls of the function of a node."""
        here = function_name(self.function(node))
        return [call for name, call in self.calls if name == here and is_own(name, call)]

    def possible_callers(self, node: cst.CSTNode) -> list[cst.Call]:
        """Return the calls of the function of a node; of a method, on any object."""
        function = self.function(node)
        is_method = self.owner(function) is not function
        named = [call for name, call in self.calls if name == function_name(function)]
        return [call for call in named if is_method or is_own(function_name(function), call)]

    def leading(self, nodes: Iterable[Any]) -> list[cst.CSTNode]:
        """Return these nodes, and all calls that lead to them."""
        found = list(nodes)
        for each in found:
            found += [call for call in self.callers(each) if call not in found]
        return found

    def reached(self, names: set[str], without: frozenset[str] = frozenset()) -> set[str]:
        """Return the names of functions and of those that they call, also through others.

        But not through those of the names `without`.
        """
        found, size = set(names), -1
        while size != len(found):
            size = len(found)
            found |= {
                name
                for name, call in self.calls
                if function_name(self.function(call)) in found - without
                and not any(isinstance(each, LATER) for each in self.parents(call))
            }
        return found

    def are_branches(self, one: cst.CSTNode, other: cst.CSTNode) -> bool:
        """Return whether two nodes of a function are in different branches of a condition."""
        around = set(self.parents(other))
        common = next(each for each in self.parents(one) if each in around)
        return isinstance(common, (cst.If, cst.Match))
