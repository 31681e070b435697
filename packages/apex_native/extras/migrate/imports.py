"""Imports: those of Apex that nothing uses any longer are removed, torch is added if missing."""

import re
from collections.abc import Sequence
from typing import Any

import libcst as cst
from libcst import matchers
from libcst.codemod import CodemodContext
from libcst.codemod.visitors import AddImportsVisitor
from libcst.helpers import get_full_name_for_node

from ..covered import COVERED
from .places import plain_source, source
from .report import PREFIX
from .tree import OutsideImports

STILL_USED = "what this imports from Apex may be used in a way that migrate does not rewrite"
NOTE = cst.Comment(PREFIX + STILL_USED)
# What ``from apex.fp16_utils import *`` imports, which many scripts have without need.
FP16_UTILS = {"fp16util", "fp16_optimizer", "loss_scaler"}.union(
    *(names.split() for names in COVERED["apex.fp16_utils"].values())
)


class _Used(OutsideImports):
    """The names that a module uses outside its imports, or exports in ``__all__``."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def visit_AssignTarget(self, node: cst.AssignTarget) -> bool:
        return not isinstance(node.target, cst.Name)

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> None:
        if plain_source(node).startswith("__all__"):
            self.names.update(re.findall(r"\w+", plain_source(node)))

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        node.value.visit(self)
        return False

    def visit_Name(self, node: cst.Name) -> None:
        self.names.add(node.value)


def apex_imports(module: cst.CSTNode) -> dict[tuple[str, ...], cst.CSTNode]:
    """Return the import statements of Apex in `module`, by module, name and local name."""
    found: dict[tuple[str, ...], cst.CSTNode] = {}
    imports: Sequence[Any] = matchers.findall(module, matchers.Import() | matchers.ImportFrom())
    for node in imports:
        package = ""
        if isinstance(node, cst.ImportFrom):
            if node.relative or not node.module:
                continue
            package = get_full_name_for_node(node.module) or ""
        names: list[tuple[str, str | None]] = [("*", None)]
        if not isinstance(node.names, cst.ImportStar):
            names = [(each.evaluated_name, each.evaluated_alias) for each in node.names]
        for name, local in names:
            if (package or name).split(".")[0] == "apex":
                found[package, name, local or name] = node
    return found


class NoteImports(cst.CSTTransformer):
    """Transformer that adds a comment above each of these imports of Apex."""

    def __init__(self, imports: set[tuple[str, ...]]) -> None:
        self.imports = imports

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        if not self.imports & set(apex_imports(original_node)):
            return updated_node
        lines = [*updated_node.leading_lines, cst.EmptyLine(comment=NOTE)]
        return updated_node.with_changes(leading_lines=lines)


class _Remove(cst.CSTTransformer):
    def __init__(self, used: set[str]) -> None:
        self.used = used

    def _keep(self, names: Sequence[cst.ImportAlias], prefix: str) -> list[cst.ImportAlias]:
        def is_unused(alias: cst.ImportAlias) -> bool:
            name = get_full_name_for_node(alias.name) or ""
            local = alias.evaluated_alias or (name if prefix else name.split(".")[0])
            # A text may name a class, such as an option's.
            by_text = local[:1].isupper() and not self.used.isdisjoint(("eval", "globals"))
            is_used = local in self.used or by_text
            return (prefix or name).split(".")[0] == "apex" and not is_used

        return [alias for alias in names if not is_unused(alias)]

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> Any:
        return _with_names(updated_node, self._keep(original_node.names, ""))

    def leave_ImportFrom(self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom) -> Any:
        module = get_full_name_for_node(original_node.module) if original_node.module else None
        if original_node.relative or not module:
            return updated_node
        if isinstance(original_node.names, cst.ImportStar):
            is_used = module != "apex.fp16_utils" or not FP16_UTILS.isdisjoint(self.used)
            return updated_node if is_used else cst.RemoveFromParent()
        return _with_names(updated_node, self._keep(original_node.names, module))

    def leave_Try(self, original_node: cst.Try, updated_node: cst.Try) -> Any:
        """Remove a try whose imports are gone, if the rest only reports, or sets flags."""
        lines = list(updated_node.body.body)
        if updated_node.finalbody or len(lines) == len(original_node.body.body):
            return updated_node
        if isinstance(updated_node.orelse, cst.Else):
            lines += updated_node.orelse.body.body
        lines = [line for line in lines if not _flags(line) or self.used & set(_flags(line))]
        rest = [line for each in updated_node.handlers for line in each.body.body]
        flags = {name for line in rest for name in _flags(line)}
        kept = {name for line in lines for name in _flags(line)}
        if not all(_flags(line) for line in lines) or not all(_is_harmless(line) for line in rest):
            return updated_node
        if not lines and not flags & self.used:
            return cst.RemoveFromParent()
        return cst.FlattenSentinel(lines) if lines and flags & self.used <= kept else updated_node

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> Any:
        """Remove an if about an import or a statement that is gone."""
        is_name = re.fullmatch(r"[\w.]+|\w*apex\w*\(\)", source(updated_node.test))
        if is_name and not updated_node.orelse and not updated_node.body.body:
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


def _flags(line: cst.CSTNode) -> list[str]:
    """Return the names to which a statement assigns True, False or None."""
    match = re.fullmatch(r"(\w+) *= *(True|False|None)", source(line).split("#")[0].strip())
    return [match[1]] if match else []


def _is_harmless(line: cst.CSTNode) -> bool:
    """Return whether a handler's statement only reports, raises or sets a flag."""
    small = line.body if isinstance(line, cst.SimpleStatementLine) else [line]
    plain = (cst.Expr, cst.Pass, cst.Raise)
    return all(isinstance(each, plain) for each in small) or bool(_flags(line))


def _has_torch(module: cst.Module) -> bool:
    """Return whether the module imports torch before it uses it.

    libcst looks at the first block of imports only; a line before torch's may set the environment.
    """
    for statement in module.body:
        for line in statement.body if isinstance(statement, cst.SimpleStatementLine) else ():
            names = line.names if isinstance(line, cst.Import) else ()
            bound = {one.evaluated_alias or one.evaluated_name.split(".")[0] for one in names}
            if "torch" in bound:
                return True
        used = _Used()
        statement.visit(used)
        if "torch" in used.names:
            return False
    return False


def clean(module: cst.Module) -> cst.Module:
    """Return `module` without unused imports of Apex, and with ``import torch``."""
    used = _Used()
    module.visit(used)
    module = module.visit(_Remove(used.names))
    if "torch" not in used.names or _has_torch(module):
        return module
    context = CodemodContext()
    AddImportsVisitor.add_needed_import(context, "torch")
    return AddImportsVisitor(context).transform_module(module)
