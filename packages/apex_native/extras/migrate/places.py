"""Places in a script: names, conditions, and the statements that compute a loss."""

import ast
import re
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import libcst as cst
from libcst import matchers
from libcst.metadata import QualifiedName, QualifiedNameSource

NONE = "None"
REDUCTIONS = {"mean", "sum"}  # functions and methods that need no casts
# Methods that change a list or a dict, and those of a buffer, as of reinforcement learning.
LISTING = {"append", "extend", "insert", "update"}
ADDING = {*LISTING, "appendleft", "add", "put", "push", "store", "enqueue", "remember"}
ASSIGNMENT = matchers.OneOf(
    *(matchers.AssignTarget(), matchers.AugAssign(), matchers.AnnAssign(), matchers.NamedExpr())
)
_ADDING = matchers.Name(matchers.MatchIfTrue(ADDING.__contains__))
ADDED = matchers.Expr(matchers.Call(matchers.Attribute(attr=_ADDING)))  # torch.add() returns a sum


def source(node: cst.CSTNode) -> str:
    """Return the source code of `node`."""
    return cst.Module(body=[]).code_for_node(node)


@lru_cache(2**14)  # statements are asked about once for each loss
def plain_source(node: cst.CSTNode) -> str:
    """Return the source code of an expression, statement or block without comments.

    Its layout is that of ast.unparse. A block begins with a line `if 1:`.
    """
    code = source(node.body if isinstance(node, cst.Else) else node)
    if isinstance(node, (cst.Else, cst.BaseSuite)):
        code = f"if 1:{code}"
    elif isinstance(node, cst.BaseExpression):
        code = f"({code})"  # in which it may have line ends
    return ast.unparse(ast.parse(code))


def is_own(name: str, call: cst.Call) -> bool:
    """Return whether a call is of the script's function or method of this name, by its form."""
    return source(call.func) in (name, f"self.{name}")


def names_in(node: cst.CSTNode) -> set[str]:
    """Return all names in `node`, and ``self.x`` as ``x``."""
    names: Sequence[Any] = matchers.findall(node, matchers.Name())
    return {name.value for name in names} - {"self"}


def pairs(node: cst.Assign) -> list[tuple[cst.BaseExpression, cst.BaseExpression]]:
    """Return the targets of an assignment and their values, also of the items of tuples."""
    found: list[tuple[cst.BaseExpression, cst.BaseExpression]] = []
    for each in node.targets:
        found.append((each.target, node.value))
        if isinstance(each.target, cst.Tuple) and isinstance(node.value, cst.Tuple):
            items = zip(each.target.elements, node.value.elements, strict=False)
            found += [(one.value, other.value) for one, other in items]
    return found


def last_name(value: cst.BaseExpression) -> str:
    """Return the last name of a name or of ``a.b.c``, "" for other expressions."""
    if isinstance(value, cst.Attribute):
        return value.attr.value
    return value.value if isinstance(value, cst.Name) else ""


def last_names(value: cst.BaseExpression) -> set[str]:
    """Return the last names of an expression, or of the items of a list or tuple."""
    items = value.elements if isinstance(value, (cst.List, cst.Tuple)) else ()
    return ({last_name(item.value) for item in items} or {last_name(value)}) - {""}


@lru_cache(2**14)  # statements are asked about once for each loss
def assigned(node: cst.CSTNode) -> frozenset[str]:
    """Return the names that a statement assigns, also in its blocks."""
    assignments: Sequence[Any] = matchers.findall(node, ASSIGNMENT)
    added: Sequence[Any] = matchers.findall(node, ADDED)
    targets = [each.target for each in assignments]
    targets += [each.value.func.value for each in added]
    return frozenset().union(*map(names_in, targets))


def forward_range(body: Sequence[Any], end: int, wanted: set[str]) -> range:
    """Return the statements before `end` from the first that computes one of the names `wanted`.

    The range is empty if none does. Adds the names that these are computed from to `wanted`.
    """
    first = end
    for index in range(end - 1, -1, -1):
        line = body[index]
        if assigned(line) & wanted:
            wanted |= names_in(line)
            first = index if re.search(r"[(@]", plain_source(line)) else first
    return range(first, end)


def is_boundary(line: cst.BaseStatement) -> bool:
    """Return whether a statement belongs to the backward pass or the update."""
    code = plain_source(line)
    return any(text in code for text in (".backward(", ".step(", ".zero_grad(", "scale_loss("))


def is_backward_alone(body: cst.BaseSuite, name: str) -> bool:
    """Return whether a block begins with ``name.backward(...)`` and has no other use of a name."""
    code = plain_source(body).removeprefix("if 1:").strip()
    uses = len(re.findall(rf"\b{re.escape(name)}\b", code))
    return name.isidentifier() and code.startswith(f"{name}.backward(") and uses == 1


def computes(value: cst.BaseExpression) -> bool:
    """Return whether an expression calls more than a reduction, such as a loss function."""
    names = re.findall(r"([\w\]\)]+)\(", plain_source(value))
    return bool({*names} - REDUCTIONS) or "@" in plain_source(value)


def none_fallbacks(module: cst.Module) -> set[str]:
    """Return the names that a module assigns only None, as after a failed import."""
    values: dict[str, set[str]] = {}
    assignments: Sequence[Any] = matchers.findall(module, matchers.Assign())
    for target, value in chain.from_iterable(map(pairs, assignments)):
        values.setdefault(source(target), set()).add(source(value))
    return {name for name, given in values.items() if given == {NONE}}


class _Flags(cst.CSTVisitor):
    """The names that get True where Apex is imported, and those that get other values."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self.others: set[str] = set()
        self.around: cst.Try | None = None  # which imports Apex
        self.ifs = 0  # around a statement, which may depend on an option

    def visit_Try(self, node: cst.Try) -> None:
        block = node.orelse.body.body if node.orelse else ()
        lines = [plain_source(line) for line in (*node.body.body, *block)]
        if not self.ifs and any(re.match(r"(import|from) apex\b", line) for line in lines):
            self.around = node
            self.found.update(line[:-7] for line in lines if re.fullmatch(r"\w+ = True", line))

    def leave_Try(self, original_node: cst.Try) -> None:
        self.around = None if self.around is original_node else self.around

    def visit_If(self, node: cst.If) -> None:
        self.ifs += 1

    def leave_If(self, original_node: cst.If) -> None:
        self.ifs -= 1

    def visit_Assign(self, node: cst.Assign) -> bool:
        for target in node.targets:
            name, value = source(target.target), source(node.value)
            is_first = name not in self.found and value == "False"
            is_inner = self.around and not self.ifs and value in ("True", "False")
            if not is_first and not is_inner:
                self.others.update(names_in(target.target))
        return False

    def visit_Param(self, node: cst.Param) -> None:
        self.others.add(node.name.value)

    def visit_AugAssign(self, node: cst.AugAssign | cst.AnnAssign) -> None:
        self.others.update(names_in(node.target))

    visit_AnnAssign = visit_AugAssign


def availability_flags(module: cst.Module) -> set[str]:
    """Return the names that are True where Apex can be imported, and False elsewhere.

    They have no other values: an option that disables amp may be one.
    """
    flags = _Flags()
    module.visit(flags)
    return flags.found - flags.others


def apex_name(names: Collection[QualifiedName], fallbacks: set[str]) -> str:
    """Return the name of Apex among those a node may have, or "".

    None in place of a failed import is no other name: the script does not call it.
    """
    known = {
        each.name
        for each in names
        if each.source is not QualifiedNameSource.LOCAL
        or each.name.split("<locals>.")[-1].split(".")[0] not in fallbacks
    }
    apex = sorted(name for name in known if name.split(".")[0] == "apex")
    if apex and len(known) > 1:
        return f"{apex[0]} or another"  # a fallback after a failed import
    return apex[0] if apex else ""


def is_method_of_result(function: cst.BaseExpression) -> bool:
    """Return whether a function is a method of what a call returns, as in ``FusedAdam(p).step``."""
    while isinstance(function, cst.Attribute):
        function = function.value
    return isinstance(function, cst.Call)


def simplify(
    test: cst.BaseExpression, is_apex: Callable[[cst.CSTNode], bool]
) -> cst.BaseExpression | bool:
    """Return a condition as it is where Apex can be imported, without the question for it."""
    if is_apex(test):
        return True
    if isinstance(test, cst.Comparison) and is_apex(test.left):
        if source(test.comparisons[0].comparator) == NONE:
            return isinstance(test.comparisons[0].operator, cst.IsNot | cst.NotEqual)
        return test
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        inner = simplify(test.expression, is_apex)
        return not inner if isinstance(inner, bool) else test
    if not isinstance(test, cst.BooleanOperation):
        return test
    left, right = simplify(test.left, is_apex), simplify(test.right, is_apex)
    decisive = isinstance(test.operator, cst.Or)  # `True or x` is True, `False and x` False
    for one, other in ((left, right), (right, left)):
        if isinstance(one, bool):
            return one if one is decisive else other
    return test.with_changes(left=left, right=right)


def as_bool(test: cst.BaseExpression, flags: set[str]) -> str:
    """Return a condition as an expression of type bool, which autocast requires.

    `flags` are the names of command-line flags without a value.
    """
    code = source(test)
    if isinstance(test, cst.Comparison) or code in ("True", "False"):
        return code
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        return code
    if isinstance(test, cst.Attribute) and test.attr.value in flags:
        return code
    return f"bool({code})"


def new_name(module: cst.Module, names: Sequence[str]) -> str:
    """Return the first of `names` that a module does not use, or "" if it uses all."""
    used = names_in(module)
    return next((name for name in names if name not in used), "")
