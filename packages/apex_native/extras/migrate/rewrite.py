"""The transformer that applies the rules to a module."""

from typing import Any

import libcst as cst
from libcst.metadata import ParentNodeProvider, PositionProvider, QualifiedNameProvider

from .amp import Usage, forward_range, models_and_optimizers, source
from .calls import RULES
from .report import PREFIX, Report

STATEMENTS = (cst.SimpleStatementLine, cst.BaseCompoundStatement)


class Rewrite(cst.CSTTransformer):
    """Applies the rules, and records in `report` what it changed and left."""

    METADATA_DEPENDENCIES = (QualifiedNameProvider, PositionProvider, ParentNodeProvider)

    def __init__(self, usage: Usage, report: Report) -> None:
        super().__init__()
        self.usage, self.report = usage, report
        self.notes: dict[cst.CSTNode, list[str]] = {}
        self.results: dict[cst.CSTNode, Any] = {}

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> Any:
        """Add the notes on a statement as comments above it."""
        result: Any = super().on_leave(original_node, updated_node)
        if isinstance(original_node, STATEMENTS):
            notes = self.notes.get(original_node, [])
            lines = [cst.EmptyLine(comment=cst.Comment(PREFIX + note)) for note in notes]
            if lines and isinstance(result, STATEMENTS) and PREFIX not in source(original_node):
                result = result.with_changes(leading_lines=[*result.leading_lines, *lines])
            self.results[original_node] = result
        return result

    def _name(self, node: cst.CSTNode) -> str:
        names = {each.name for each in self.get_metadata(QualifiedNameProvider, node, set())}
        apex = [name for name in names if name.startswith("apex.")]
        if apex and len(names) > 1:
            return f"{apex[0]} or another"  # a fallback after a failed import
        return apex[0] if apex else ""

    def _amp_name(self, node: cst.CSTNode) -> str:
        name = self._name(node.func) if isinstance(node, cst.Call) else ""
        return name.removeprefix("apex.amp.") if name.startswith("apex.amp.") else ""

    def _line(self, node: cst.CSTNode) -> int:
        return int(self.get_metadata(PositionProvider, node).start.line)

    def _leave_as_is(self, node: cst.CSTNode, why: str) -> None:
        self.report.left.append((self._line(node), why))
        while not isinstance(node, STATEMENTS):
            node = self.get_metadata(ParentNodeProvider, node)
        notes = self.notes.setdefault(node, [])
        if why not in notes:
            notes.append(why)

    def _changed(self, node: cst.CSTNode, what: str) -> None:
        self.report.changed.append((self._line(node), what))

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> Any:
        """Apply the rule for a call of a name of Apex."""
        name = self._name(original_node.func)
        if not name:
            return updated_node
        short = name.removeprefix("apex.")
        if name.startswith("apex.amp."):
            return self._amp_call(original_node, updated_node, short)
        if name not in RULES:
            self._leave_as_is(original_node, f"torch has no {short}; apex_native has it")
            return updated_node
        result = RULES[name](updated_node)
        if isinstance(result, str):
            self._leave_as_is(original_node, f"{short}: {result}")
            return updated_node
        self._changed(original_node, f"{short} → {source(result.func)}")
        return result

    def _amp_call(self, original: cst.Call, updated: cst.Call, short: str) -> Any:
        if self.usage.reasons:
            self._leave_as_is(original, f"{short}: {self.usage.reasons[0]}")
            return updated
        if short == "amp.master_params":
            owner = source(updated.args[0].value)
            code = f'[p for group in {owner}.param_groups for p in group["params"]]'
            self._changed(original, f"{short} → the optimizer's parameters")
            return cst.parse_expression(code)
        if short == "amp.state_dict":
            self._changed(original, f"{short} → GradScaler's, or an empty one without a scaler")
            return cst.parse_expression("scaler.state_dict()" if self.usage.scaled else "{}")
        if short == "amp.load_state_dict" and self.usage.scaled:
            self._changed(original, f"{short} → scaler.load_state_dict")
            return updated.with_changes(func=cst.parse_expression("scaler.load_state_dict"))
        return updated

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        """Rewrite statements that initialize amp, clip gradients or step an optimizer."""
        if self.usage.reasons or len(original_node.body) != 1:
            return updated_node
        small = original_node.body[0]
        if isinstance(small, (cst.Assign, cst.Expr)) and isinstance(small.value, cst.Call):
            name = self._amp_name(small.value)
            if name == "initialize":
                return self._initialize(small, updated_node)
            if name == "load_state_dict" and not self.usage.scaled:
                self._changed(original_node, "amp.load_state_dict removed: there is no scaler")
                return cst.RemoveFromParent()
        if not self.usage.scaled:
            return updated_node
        (optimizer,) = self.usage.optimizers
        if source(small) == f"{optimizer}.step()":
            self._changed(original_node, "step() → scaler.step() and scaler.update()")
            step = cst.parse_statement(f"scaler.step({optimizer})")
            step = step.with_changes(leading_lines=updated_node.leading_lines)
            return cst.FlattenSentinel([step, cst.parse_statement("scaler.update()")])
        if "master_params(" in source(small):
            unscale = cst.parse_statement(f"scaler.unscale_({optimizer})")
            return cst.FlattenSentinel([unscale, updated_node])
        return updated_node

    def _initialize(self, small: cst.Assign | cst.Expr, updated: cst.SimpleStatementLine) -> Any:
        assert isinstance(small.value, cst.Call)
        given = ", ".join(source(value) for value in models_and_optimizers(small.value))
        target = (
            source(small.targets[0].target).strip("()") if isinstance(small, cst.Assign) else ""
        )
        self._changed(small, f"amp.initialize removed ({self.usage.level})")
        lines: list[Any] = []
        if target and target != given:
            lines.append(cst.parse_statement(f"{target} = {given}"))
        if self.usage.level != "O0":
            what = "forward passes that compute no scaled loss, as in validation, run in float32"
            self._changed(small, what)
        if not lines:
            return cst.RemoveFromParent()
        lines[0] = lines[0].with_changes(leading_lines=updated.leading_lines)
        return cst.FlattenSentinel(lines)

    def leave_With(self, original_node: cst.With, updated_node: cst.With) -> Any:
        """Replace a with statement of scale_loss by its body."""
        item = original_node.items[0]
        if self.usage.reasons or self._amp_name(item.item) != "scale_loss":
            return updated_node
        assert isinstance(item.item, cst.Call)
        assert item.asname is not None
        assert isinstance(updated_node.body, cst.IndentedBlock)
        loss, alias = source(item.item.args[0].value), source(item.asname.name)
        plain = isinstance(item.item.args[0].value, (cst.Name, cst.Attribute, cst.Call))
        new = f"scaler.scale({loss})" if self.usage.scaled else loss if plain else f"({loss})"
        self._changed(original_node, f"scale_loss → {new}")
        body: Any = updated_node.body.visit(_Rename(alias, cst.parse_expression(new)))
        lines = list(body.body)
        lead = [*updated_node.leading_lines, *lines[0].leading_lines]
        lines[0] = lines[0].with_changes(leading_lines=lead)
        return cst.FlattenSentinel(lines)

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> Any:
        """Put the computation of the losses of the block under autocast."""
        return self._wrap(original_node, updated_node)

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> Any:
        """Do the same at the top level."""
        module = self._wrap(original_node, updated_node)
        if self.usage.reasons or not self.usage.scaled:
            return module
        # At the top level, since a function may initialize amp and another one train.
        scaler = cst.parse_statement('scaler = torch.amp.GradScaler("cuda")')
        lines = list(module.body)
        place = next((i for i, line in enumerate(lines) if not _is_import(line)), len(lines))
        scaler = scaler.with_changes(leading_lines=[cst.EmptyLine(indent=False)])
        return module.with_changes(body=[*lines[:place], scaler, *lines[place:]])

    def _wrap(self, original: Any, updated: Any) -> Any:
        if self.usage.reasons or self.usage.level == "O0":
            return updated
        inside: set[int] = set()
        for index, line in enumerate(original.body):
            item: Any = line.items[0].item if isinstance(line, cst.With) else line
            if self._amp_name(item) == "scale_loss":
                inside |= set(forward_range(original.body, index, item.args[0].value))
        boundaries = {i for i, line in enumerate(original.body) if _is_boundary(line)}
        body: list[Any] = []
        group: list[Any] = []
        for index, line in enumerate(original.body):
            result = self.results[line]
            if isinstance(result, cst.RemovalSentinel):
                continue
            nodes = list(result) if isinstance(result, cst.FlattenSentinel) else [result]
            if index in inside - boundaries:
                group += nodes
                continue
            body += self._autocast(group)
            group = []
            body += nodes
        return updated.with_changes(body=[*body, *self._autocast(group)])

    def _autocast(self, group: list[Any]) -> list[Any]:
        if not group:
            return []
        item = cst.WithItem(cst.parse_expression(self.usage.autocast()))
        lead = group[0].leading_lines
        inner = cst.IndentedBlock([group[0].with_changes(leading_lines=[]), *group[1:]])
        return [cst.With([item], inner, leading_lines=lead)]


class _Rename(cst.CSTTransformer):
    """Replaces a name by an expression."""

    def __init__(self, name: str, new: cst.BaseExpression) -> None:
        self.name, self.new = name, new

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> Any:
        return self.new if original_node.value == self.name else updated_node


def _is_import(line: cst.BaseStatement) -> bool:
    """Return whether a statement is an import, in a try perhaps, or a docstring."""
    first = line.body.body[0] if isinstance(line, cst.Try) and line.body.body else line
    small = first.body[0] if isinstance(first, cst.SimpleStatementLine) else None
    is_text = isinstance(small, cst.Expr) and isinstance(small.value, cst.SimpleString)
    return is_text or isinstance(small, (cst.Import, cst.ImportFrom))


def _is_boundary(line: cst.BaseStatement) -> bool:
    """Return whether a statement belongs to the backward pass or the update."""
    code = source(line)
    return any(text in code for text in (".backward(", ".step(", ".zero_grad(", "scale_loss("))
