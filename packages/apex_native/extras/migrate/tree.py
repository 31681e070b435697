"""Names in a module, and positions of statements: blocks, functions and conditions around them."""

from collections.abc import Collection, Iterator
from typing import Any

import libcst as cst
from libcst import matchers
from libcst.metadata import (
    ParentNodeProvider,
    PositionProvider,
    QualifiedName,
    QualifiedNameProvider,
)

from .places import apex_name, simplify
from .usage import Usage

STATEMENTS = (cst.SimpleStatementLine, cst.BaseCompoundStatement)
BLOCKS = (cst.IndentedBlock, cst.Module)
LOOPS = (cst.For, cst.While)
IS_MAIN = matchers.Comparison(left=matchers.Name("__name__"))


class OutsideImports(cst.CSTVisitor):
    """A visitor that leaves out imports, and the names of keyword arguments."""

    def visit_Import(self, node: cst.Import | cst.ImportFrom) -> bool:
        return False

    visit_ImportFrom = visit_Import

    def visit_Arg(self, node: cst.Arg) -> bool:
        node.value.visit(self)
        return False


class Tree(cst.MetadataDependent):
    """Names and positions of nodes, for a visitor or a transformer."""

    METADATA_DEPENDENCIES = (ParentNodeProvider, PositionProvider, QualifiedNameProvider)

    def __init__(self, usage: Usage) -> None:
        super().__init__()
        self.usage = usage

    def qualified_names(self, node: cst.CSTNode) -> Collection[QualifiedName]:
        """Return the names that a node may have, such as ``torch.nn.Linear``."""
        return self.get_metadata(QualifiedNameProvider, node, set())

    def name(self, node: cst.CSTNode) -> str:
        """Return the name of Apex that `node` has, or ""."""
        return apex_name(self.qualified_names(node), self.usage.fallbacks)

    def simplified(self, test: cst.BaseExpression) -> cst.BaseExpression | bool:
        """Return a condition as it is where Apex can be imported."""
        return simplify(test, lambda node: self.usage.is_available(node, self.name(node)))

    def parent(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return the node around `node`."""
        return self.get_metadata(ParentNodeProvider, node)

    def parents(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the nodes around `node`, to the function or the module that it belongs to."""
        while not isinstance(node, (cst.Module, cst.FunctionDef)):
            node = self.parent(node)
            yield node

    def function(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return the function or the module that `node` belongs to."""
        return [node, *self.parents(node)][-1]

    def owner(self, function: cst.CSTNode) -> cst.CSTNode:
        """Return the class of a method, and another function itself."""
        if not isinstance(function, cst.FunctionDef):
            return function
        block = self.parent(function)
        around = self.parent(block) if isinstance(block, cst.IndentedBlock) else function
        return around if isinstance(around, cst.ClassDef) else function

    def line(self, node: cst.CSTNode) -> int:
        """Return the line at which `node` starts."""
        return int(self.get_metadata(PositionProvider, node).start.line)

    def loops(self, node: cst.CSTNode) -> list[cst.CSTNode]:
        """Return the loops around `node` in its function, the innermost one first."""
        return [each for each in self.parents(node) if isinstance(each, LOOPS)]

    def loop(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """Return the innermost loop around `node` in its function, or None."""
        return next(iter(self.loops(node)), None)

    def statement(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return the innermost statement that contains `node`."""
        return next(each for each in (node, *self.parents(node)) if isinstance(each, STATEMENTS))

    def levels(self, node: cst.CSTNode) -> Iterator[tuple[Any, int]]:
        """Yield the blocks around a statement and its index, to the loop or the function."""
        for parent in self.parents(node):
            if isinstance(parent, BLOCKS):
                yield parent, list(parent.body).index(node)  # type: ignore[arg-type]
            if isinstance(parent, LOOPS):
                return
            node = parent

    def conditions(self, node: cst.CSTNode) -> Iterator[tuple[cst.If, bool]]:
        """Yield the ifs around `node`, and whether it is in the branch where the test holds.

        Except ``if __name__ == "__main__"``, which always holds.
        """
        for parent in self.parents(node):
            if isinstance(parent, cst.If) and not matchers.matches(parent.test, IS_MAIN):
                yield parent, node is parent.body
            node = parent
