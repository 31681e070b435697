"""Uses of Apex's classes other than calls, such as ``isinstance(module, FusedLayerNorm)``."""

import libcst as cst

from .places import NONE, source
from .tree import OutsideImports, Tree

MADE_BY = {"SyncBatchNorm": "convert_syncbn_model"}  # classes, and functions that create them
# Around a name that gets another value, is asked for its truth, or states a type.
HARMLESS = (cst.AssignTarget, cst.NameItem, cst.If, cst.Assert, cst.UnaryOperation, cst.Annotation)


class References(OutsideImports, Tree):
    """Visitor that adds classes of Apex that a module uses without calling them to `usage`.

    A class of torch in their place would not be the one that these uses compare with or change.
    """

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        self._add(node)
        node.value.visit(self)  # not the attribute's own name
        return False

    def visit_Name(self, node: cst.Name) -> None:
        self._add(node)

    def _add(self, node: cst.Attribute | cst.Name) -> None:
        names = self.qualified_names(node)
        name = self.name(node).removesuffix(" or another").rpartition(".")[2]
        calls = (each for each in self.parents(node) if isinstance(each, cst.Call))
        if any(source(call.func) in ("isinstance", "issubclass") for call in calls):
            torchs = [each.name for each in names if each.name.startswith("torch.")]
            self.usage.compared |= {each.rpartition(".")[2] for each in torchs}
        parent = self.parent(node)
        is_call = isinstance(parent, cst.Call) and parent.func is node
        is_type = any(isinstance(each, cst.Annotation) for each in self.parents(node))
        is_test = isinstance(parent, cst.Comparison) and (
            source(parent.comparisons[0].comparator) == NONE
        )
        tested: cst.CSTNode = node
        while isinstance(parent, cst.BooleanOperation):
            tested, parent = parent, self.parent(parent)
        is_test |= isinstance(parent, cst.IfExp) and parent.test is tested
        if name and not (is_call or is_type or is_test or isinstance(parent, HARMLESS)):
            self.usage.referenced |= {name: name, MADE_BY.get(name, name): name}
