"""Imports: those of Apex that nothing uses any longer are removed, torch is added if missing."""

from collections.abc import Sequence
from typing import Any

import libcst as cst
from libcst.codemod import CodemodContext
from libcst.codemod.visitors import AddImportsVisitor
from libcst.helpers import get_full_name_for_node


class _Used(cst.CSTVisitor):
    """The names that a module uses outside its imports."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def visit_Import(self, node: cst.Import) -> bool:  # noqa: ARG002
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:  # noqa: ARG002
        return False

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        node.value.visit(self)
        return False

    def visit_Name(self, node: cst.Name) -> None:
        self.names.add(node.value)


class _Remove(cst.CSTTransformer):
    def __init__(self, used: set[str]) -> None:
        self.used = used

    def _keep(self, names: Sequence[cst.ImportAlias], prefix: str) -> list[cst.ImportAlias]:
        def is_unused(alias: cst.ImportAlias) -> bool:
            name = get_full_name_for_node(alias.name) or ""
            local = alias.evaluated_alias or (name if prefix else name.split(".")[0])
            return (prefix or name).split(".")[0] == "apex" and local not in self.used

        return [alias for alias in names if not is_unused(alias)]

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> Any:
        return _with_names(updated_node, self._keep(original_node.names, ""))

    def leave_ImportFrom(self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom) -> Any:
        module = get_full_name_for_node(original_node.module) if original_node.module else None
        if isinstance(original_node.names, cst.ImportStar) or original_node.relative or not module:
            return updated_node
        return _with_names(updated_node, self._keep(original_node.names, module))

    def leave_Try(self, original_node: cst.Try, updated_node: cst.Try) -> Any:
        """Remove a try whose imports are gone, if its handlers only report or raise."""
        emptied = original_node.body.body and not updated_node.body.body
        if emptied and not updated_node.orelse and not updated_node.finalbody:
            handlers = [line for each in updated_node.handlers for line in each.body.body]
            if all(_only_reports(line) for line in handlers):
                return cst.RemoveFromParent()
        return updated_node


def _with_names(node: cst.Import | cst.ImportFrom, names: list[cst.ImportAlias]) -> Any:
    assert not isinstance(node.names, cst.ImportStar)
    if len(names) == len(node.names):
        return node
    if not names:
        return cst.RemoveFromParent()
    names[-1] = names[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    return node.with_changes(names=names)


def _only_reports(line: cst.BaseStatement | cst.BaseSmallStatement) -> bool:
    small = line.body if isinstance(line, cst.SimpleStatementLine) else [line]
    return all(isinstance(each, (cst.Expr, cst.Pass, cst.Raise)) for each in small)


def clean(module: cst.Module) -> cst.Module:
    """Return `module` without unused imports of Apex, and with ``import torch``."""
    used = _Used()
    module.visit(used)
    module = module.visit(_Remove(used.names))
    if "torch" not in used.names:
        return module
    context = CodemodContext()
    AddImportsVisitor.add_needed_import(context, "torch")
    return AddImportsVisitor(context).transform_module(module)
