"""Arguments of ``amp.initialize``, also those unpacked from a dictionary of the same function."""

import libcst as cst
from libcst.metadata import PositionProvider

from .tree import Tree

PREPARED = {"models", "optimizers"}  # which may be other objects when the call runs
OPTIONAL = {"keep_batchnorm_fp32", "loss_scale", "master_weights", "verbosity"}

Items = list[tuple[str, cst.BaseExpression]]


def expand(tree: Tree, call: cst.Call) -> cst.Call:
    """Return `call` with the keywords of the dictionary that it unpacks, if all are known.

    Only keywords of `OPTIONAL` may depend on a condition: without half weights, they change nothing
    but the loss scale, which is checked as if it were given.
    """
    stars = [arg for arg in call.args if arg.star == "**"]
    if len(stars) != 1 or not isinstance(stars[0].value, cst.Name):
        return call
    items = _find_items(tree, call, stars[0].value)
    names = {name for name, _ in items or []}
    if not items or len(names) != len(items) or PREPARED & names:
        return call
    args = [arg for arg in call.args if arg is not stars[0]]
    new = [cst.Arg(value, keyword=cst.Name(name)) for name, value in items]
    return call.with_changes(args=[*args, *new])


def models_and_optimizers(call: cst.Call) -> list[cst.BaseExpression]:
    """Return what ``amp.initialize`` is given to prepare, by position or by keyword."""
    given = [arg.value for arg in call.args if arg.keyword is None and not arg.star]
    keywords = {arg.keyword.value: arg.value for arg in call.args if arg.keyword is not None}
    names = ("models", "optimizers")[len(given) :]
    return given + [keywords[name] for name in names if name in keywords]


def _find_items(tree: Tree, call: cst.Call, name: cst.Name) -> Items | None:
    """Return the items of a dictionary, or None if anything but assignments uses its name."""
    end = tree.get_metadata(PositionProvider, call).start.line
    found: Items = []
    block: cst.CSTNode | None = None  # of the dictionary's assignment
    for use in _uses(tree.function(call), name.value):
        if use is name:
            continue
        outer = tree.parent(use)
        is_item = isinstance(outer, cst.Subscript)
        target = tree.parent(outer) if is_item else outer
        assign = tree.parent(target)
        if not isinstance(assign, cst.Assign) or len(assign.targets) != 1 or target is assign.value:
            return None
        here = tree.parent(tree.parent(assign))
        items = [(_index(outer), assign.value)] if is_item else _items(assign.value)
        is_plain = block is None if not is_item else here is block or items[0][0] in OPTIONAL
        if not items or not is_plain or tree.get_metadata(PositionProvider, use).start.line > end:
            return None
        block = block or here
        found += items
    return found if all(key for key, _ in found) else None


def _uses(scope: cst.CSTNode, name: str) -> list[cst.Name]:
    found: list[cst.Name] = []

    class Names(cst.CSTVisitor):
        def visit_Name(self, node: cst.Name) -> None:
            if node.value == name:
                found.append(node)

    scope.visit(Names())
    return found


def _items(value: cst.BaseExpression) -> Items:
    """Return the items of ``dict(a=1)`` or ``{"a": 1}``, with "" for unknown keys."""
    items: Items = []
    if isinstance(value, cst.Call) and isinstance(value.func, cst.Name):
        for arg in value.args if value.func.value == "dict" else ():
            items.append((arg.keyword.value if arg.keyword else "", arg.value))
    elif isinstance(value, cst.Dict):
        for element in value.elements:
            key = _text(element.key) if isinstance(element, cst.DictElement) else ""
            items.append((key, element.value))
    return items


def _index(node: cst.CSTNode) -> str:
    """Return the key of ``d["key"]``, or ""."""
    assert isinstance(node, cst.Subscript)
    index = node.slice[0].slice
    is_one = len(node.slice) == 1 and isinstance(index, cst.Index)
    return _text(index.value) if is_one and isinstance(index, cst.Index) else ""


def _text(node: cst.BaseExpression) -> str:
    """Return the value of a string, or "" for anything else."""
    value = node.evaluated_value if isinstance(node, cst.SimpleString) else ""
    return value if isinstance(value, str) else ""
