"""The transformer that applies the rules to a module."""

from typing import Any

import libcst as cst
from libcst import matchers

from .amp import REGISTERED
from .calls import NOTES, RULES, NoEquivalentError, models_and_optimizers, unconverted
from .places import (
    computes,
    is_backward_alone,
    is_boundary,
    is_method_of_result,
    names_in,
    source,
)
from .report import PREFIX, Report
from .tree import STATEMENTS, Tree
from .usage import Usage

HALF_MOMENTS = "the script uses half types; torch's moments of half parameters are not fp32"
REFERENCED = "the file uses {} without calling it, as isinstance() does; torch's is another class"
CASTS = "forward passes that compute no scaled loss, as in validation, run in float32; outputs of "
CASTS += "the others may be half after the loss, where nothing casts them: call .float() if needed"
FUNCTIONS = "the backward pass of the file's autograd.Function runs without casts, unlike Apex's: "
FUNCTIONS += "decorate its methods with torch.amp.custom_fwd and custom_bwd"
NO_CASTS = "the model, its inputs and its outputs are no longer cast to float32"
HALF_LEVEL = "amp, which is left, may cast its parameters; torch's moments would be half"
# Of checkpoints that the script saved before; the documentation has the conversion.
OLD_SCALES = "GradScaler cannot load the state of amp in an earlier checkpoint: convert it, or the "
OLD_SCALES += "empty one of a run without amp: leave it out"
OLD_STATES = "states that Apex's FusedAdam saved lack torch's step of each parameter: convert them"
COMPARED = "isinstance(…, {}), which the file has, is true of it, and was not of Apex's"
PROBE = "this may find no Apex after the conversion, and what depends on it would not run"
NO_SYNC = "torch's has no disable_allreduce() and enable_allreduce(), but no_sync()"
PARENTHESES = str.maketrans("[]", "()")


class Rewrite(Tree, cst.CSTTransformer):
    """Transformer that applies the rules, and records in `report` what it changed and left."""

    def __init__(self, usage: Usage, report: Report) -> None:
        super().__init__(usage)
        self.report = report
        self.notes: dict[cst.CSTNode, list[str]] = {}
        self.left_names: set[str] = set()  # by which calls that are left begin, as imported
        self.results: dict[cst.CSTNode, Any] = {}

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> Any:
        """Add the notes on a statement as comments above it."""
        if original_node in self.usage.probes:
            self._leave_as_is(original_node, PROBE)
        result: Any = super().on_leave(original_node, updated_node)
        if isinstance(original_node, STATEMENTS):
            notes = self.notes.get(original_node, [])
            comments = [PREFIX + " ".join(note.split()) for note in notes]  # each is one line
            lines = [cst.EmptyLine(comment=cst.Comment(comment)) for comment in comments]
            if lines and isinstance(result, STATEMENTS):
                result = result.with_changes(leading_lines=[*result.leading_lines, *lines])
            if original_node in self.usage.unscale and not self.usage.reasons:
                result = cst.FlattenSentinel([*self._unscale(original_node), *_nodes(result)])
            self.results[original_node] = result
        return result

    def _unscale(self, node: cst.CSTNode) -> list[Any]:
        return [
            cst.parse_statement(f"{self.usage.scalers[optimizer]}.unscale_({optimizer})")
            for optimizer in self.usage.unscale[node]
        ]

    def _leave_as_is(self, call: cst.CSTNode, why: str) -> None:
        self.report.left.append((self.line(call), why))
        self.left_names.add(source(getattr(call, "func", call)).split(".")[0].strip())
        notes = self.notes.setdefault(self.statement(call), [])
        if why not in notes:
            notes.append(why)

    def _changed(self, node: cst.CSTNode, what: str) -> None:
        self.report.changed.append((self.line(node), what))

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> Any:
        """Apply the rule for a call of a name of Apex."""
        name = self.name(original_node.func)
        if not self.usage.reasons and self.usage.is_available(original_node, ""):
            self._changed(original_node, f"{source(original_node)} → True")
            return cst.Name("True")
        if not name.startswith("apex.") or is_method_of_result(original_node.func):
            return updated_node
        short = name.removeprefix("apex.")
        if name.startswith("apex.amp."):
            return self._amp_call(original_node, updated_node, short)
        if name.endswith(" or another"):
            self._leave_as_is(original_node, f"{short.split()[0]}, or what another import provides")
            return updated_node
        if name not in RULES:
            self._leave_as_is(original_node, unconverted(name))
            return updated_node
        try:
            result = self._converted(name, updated_node)
        except NoEquivalentError as error:
            self._leave_as_is(original_node, f"{short}: {error}")
            return updated_node
        self._changed(original_node, f"{short} → {source(result.func)}")
        self._add_notes(original_node, name, set(source(result.func).split(".")))
        return result

    def _add_notes(self, call: cst.Call, name: str, parts: set[str]) -> None:
        """Report what differs after the conversion of a call; `parts` are of torch's name."""
        if name in NOTES:
            self._changed(call, NOTES[name])
        if self.usage.has_load and name == "apex.optimizers.FusedAdam":
            self._changed(call, OLD_STATES)
        for part in self.usage.compared & parts:
            if part[0].isupper():
                self._changed(call, COMPARED.format(part))

    def _converted(self, name: str, call: cst.Call) -> cst.Call:
        """Return torch's call in place of one in RULES. Raises NoEquivalentError without one."""
        usage, last = self.usage, name.rpartition(".")[2]
        if usage.has_half and last in ("FusedAdam", "FusedSGD"):
            raise NoEquivalentError(HALF_MOMENTS)
        if usage.reasons and usage.may_cast and last in ("FusedAdam", "FusedSGD"):
            raise NoEquivalentError(HALF_LEVEL)
        if usage.has_allreduce and last == "DistributedDataParallel":
            raise NoEquivalentError(NO_SYNC)
        if last in usage.referenced:
            raise NoEquivalentError(REFERENCED.format(usage.referenced[last]))
        return RULES[name](call)

    def _amp_call(self, original: cst.Call, updated: cst.Call, short: str) -> Any:
        if self.usage.reasons:
            self._leave_as_is(original, f"{short}: {self.usage.reasons[0]}")
            return updated
        if short == "amp.master_params":
            owner = source(updated.args[0].value)
            code = f'(p for group in {owner}.param_groups for p in group["params"])'
            self._changed(original, f"{short} → the optimizer's parameters")
            return cst.parse_expression(code)
        if short == "amp.disable_casts":
            code = self.usage.no_autocast()
            self._changed(original, f"{short} → {code}")
            return cst.parse_expression(code)
        scaler = next(iter(self.usage.scalers.values()), "")
        if short == "amp.state_dict":
            self._changed(original, f"{short} → GradScaler's, or an empty one without a scaler")
            return cst.parse_expression(f"{scaler}.state_dict()" if scaler else "{}")
        if short == "amp.load_state_dict" and scaler:
            self._changed(original, f"{short} → {scaler}.load_state_dict")
            self._changed(original, OLD_SCALES)
            return updated.with_changes(func=cst.parse_expression(f"{scaler}.load_state_dict"))
        return updated

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        """Rewrite statements that initialize amp or step an optimizer."""
        if self.usage.reasons or len(original_node.body) != 1:
            return updated_node
        small = original_node.body[0]
        if original_node is self.usage.init_scale_statement:
            what = (
                "init_scale of GradScaler" if self.usage.scaled else "removed: there is no scaler"
            )
            self._changed(original_node, f"amp._amp_state's loss scale → {what}")
            return cst.RemoveFromParent()
        if isinstance(small, (cst.Assign, cst.Expr)) and isinstance(small.value, cst.Call):
            name = self.name(small.value.func).removeprefix("apex.amp.")
            if name == "initialize":
                return self._initialize(original_node, updated_node)
            if name == "load_state_dict" and not self.usage.scaled:
                self._changed(original_node, "amp.load_state_dict removed: there is no scaler")
                return cst.RemoveFromParent()
            if name in REGISTERED:
                self._changed(original_node, f"amp.{name} removed: O0 casts nothing")
                return cst.RemoveFromParent()
        optimizer = _owner_of_step(small)
        scaler = self.usage.scalers.get(optimizer)
        if scaler is None:
            return updated_node
        self._changed(original_node, f"step() → {scaler}.step() and {scaler}.update()")
        step = cst.parse_statement(f"{scaler}.step({optimizer})")
        step = step.with_changes(
            leading_lines=updated_node.leading_lines,
            trailing_whitespace=updated_node.trailing_whitespace,
        )
        return cst.FlattenSentinel([step, cst.parse_statement(f"{scaler}.update()")])

    def _initialize(
        self, original: cst.SimpleStatementLine, updated: cst.SimpleStatementLine
    ) -> Any:
        small = original.body[0]
        assert isinstance(small, (cst.Assign, cst.Expr))
        assert isinstance(small.value, cst.Call)
        new: Any = updated.body[0]
        given = ", ".join(source(value) for value in models_and_optimizers(new.value))
        target = ""
        if isinstance(small, cst.Assign):
            target = source(small.targets[0].target.with_changes(lpar=[], rpar=[]))
        self._changed(small, f"amp.initialize removed ({self.usage.level})")
        lines: list[Any] = []
        if target and target.translate(PARENTHESES) != given.translate(PARENTHESES):
            lines.append(cst.parse_statement(f"{target} = {given}"))
        if self.usage.ignored_level:
            what = f"{self.usage.ignored_level} is not read: the level is {self.usage.level}"
            self._changed(small, what)
        self._changed(small, CASTS if self.usage.has_autocast else NO_CASTS)
        if self.usage.has_autocast and self.usage.has_function:
            self._changed(small, FUNCTIONS)
        if not self.usage.scaled and "dynamic" in source(small.value):
            self._changed(small, "steps with inf or nan in their gradients are no longer skipped")
        if original is self.usage.start:
            lines += self._scalers()
        if not lines:
            return cst.RemoveFromParent()
        lines[0] = lines[0].with_changes(leading_lines=updated.leading_lines)
        return cst.FlattenSentinel(lines)

    def _scalers(self) -> list[Any]:
        """Return the statements that create the scalers.

        They initialize CUDA, for which a script may choose the GPU at any time before.
        """
        usage = self.usage
        if not usage.scalers:
            return []
        names = list(usage.scalers.values())
        lines = [f"global {', '.join(names)}"] if usage.is_global else []
        lines += [f"{name} = {usage.grad_scaler()}" for name in names]
        return [cst.parse_statement(line) for line in lines]

    def leave_Comparison(self, original_node: cst.Comparison, updated_node: cst.Comparison) -> Any:
        """Resolve the question whether Apex can be imported, which no longer matters."""
        result = self.simplified(original_node)
        if self.usage.reasons or not isinstance(result, bool):
            return updated_node
        return cst.Name(str(result))

    def leave_Assert(self, original_node: cst.Assert, updated_node: cst.Assert) -> Any:
        """Remove an assertion that Apex can be imported."""
        result = self.simplified(original_node.test)
        return cst.RemoveFromParent() if result is True and not self.usage.reasons else updated_node

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> Any:
        """Rewrite ifs about amp: whether to initialize it, to scale a loss, or its import."""
        usage = self.usage
        if usage.reasons:
            return updated_node
        is_elif = isinstance(self.parent(original_node), cst.If)
        test = self.simplified(original_node.test)
        if isinstance(test, bool):
            name = cst.Name(str(test))
            return updated_node.with_changes(test=name) if is_elif else _branch(updated_node, test)
        if test is not original_node.test:
            updated_node = updated_node.with_changes(test=test)
        if original_node in usage.merged:
            losses = [loss.statement for loss in usage.losses]
            return _branch(updated_node, original_node.body.body[0] in losses)
        if original_node is usage.start:
            lines = self._scalers()
            if lines:
                lead = updated_node.leading_lines
                lines[0] = lines[0].with_changes(leading_lines=lead)
                updated_node = updated_node.with_changes(leading_lines=[])
            return cst.FlattenSentinel([*lines, updated_node])
        return updated_node

    def leave_With(self, original_node: cst.With, updated_node: cst.With) -> Any:
        """Replace a with statement of scale_loss by its body."""
        losses = [loss for loss in self.usage.losses if loss.statement is original_node]
        if self.usage.reasons or not losses:
            return updated_node
        (loss,) = losses
        value = source(loss.value)
        plain = isinstance(loss.value, (cst.Name, cst.Attribute, cst.Call))
        scaler = self.usage.scalers.get(loss.optimizer)
        new = f"{scaler}.scale({value})" if scaler else value if plain else f"({value})"
        self._changed(original_node, f"scale_loss → {new}")
        lines = _statements(updated_node.body)
        is_computed = self.usage.has_autocast and computes(loss.value)
        if not is_computed and is_backward_alone(original_node.body, loss.alias):
            alias = matchers.Name(loss.alias)
            lines[0] = matchers.replace(lines[0], alias, cst.parse_expression(new))
            if loss.alias in names_in(loss.value):
                self._changed(original_node, f"{loss.alias} is not scaled after the backward pass")
        elif is_computed:
            value = f"({value})" if "\n" in value and not plain else value
            compute = cst.parse_statement(f"{loss.alias} = {value}")
            scale = [f"{loss.alias} = {scaler}.scale({loss.alias})"] if scaler else []
            computed = self._autocast([compute], loss.enabled)
            lines = [*computed, *map(cst.parse_statement, scale), *lines]
        else:
            lines.insert(0, cst.parse_statement(f"{loss.alias} = {new}"))
        if original_node in self.usage.unscaled:
            lines.append(cst.parse_statement(f"{scaler}.unscale_({loss.optimizer})"))
        lead = [*updated_node.leading_lines, *lines[0].leading_lines]
        lines[0] = lines[0].with_changes(leading_lines=lead)
        return cst.FlattenSentinel(lines)

    def leave_IndentedBlock(self, original_node: Any, updated_node: Any) -> Any:
        """Put the computation of the losses of the block under autocast."""
        lines = self.usage.autocast.get(original_node, {})
        if self.usage.reasons or not self.usage.has_autocast or not lines:
            return updated_node
        body: list[Any] = []
        group: list[Any] = []
        enabled = next(iter(lines.values()))
        for index, line in enumerate(original_node.body):
            nodes = _nodes(self.results[line])
            if index in lines and not is_boundary(line):
                group += nodes
                continue
            body += self._autocast(group, enabled)
            group = []
            body += nodes
        return updated_node.with_changes(body=[*body, *self._autocast(group, enabled)])

    leave_Module = leave_IndentedBlock  # the same at the top level

    def _autocast(self, group: list[Any], enabled: str) -> list[Any]:
        if not group:
            return []
        item = cst.WithItem(cst.parse_expression(self.usage.context(enabled)))
        lead = group[0].leading_lines
        inner = cst.IndentedBlock([group[0].with_changes(leading_lines=[]), *group[1:]])
        return [cst.With([item], inner, leading_lines=lead)]


def _nodes(result: Any) -> list[Any]:
    """Return the statements that a statement became: none if it was removed."""
    if isinstance(result, cst.RemovalSentinel):
        return []
    return list(result) if isinstance(result, cst.FlattenSentinel) else [result]


def _statements(block: cst.BaseSuite) -> list[Any]:
    """Return the statements of a block, of which the header's line may have some, as lines."""
    if isinstance(block, cst.SimpleStatementSuite):  # with …: scaled_loss.backward()
        end = block.trailing_whitespace
        return [cst.SimpleStatementLine(block.body, trailing_whitespace=end)]
    return list(block.body)


def _branch(node: cst.If, holds: bool) -> Any:
    """Return the statements of a branch in place of the if."""
    orelse = node.orelse
    if not holds and isinstance(orelse, cst.If):
        return orelse.with_changes(leading_lines=node.leading_lines)
    block = node.body if holds else orelse.body if isinstance(orelse, cst.Else) else None
    lines = _statements(block) if block else []
    if not lines:
        return cst.RemoveFromParent()
    lead = [*node.leading_lines, *lines[0].leading_lines]
    return cst.FlattenSentinel([lines[0].with_changes(leading_lines=lead), *lines[1:]])


def _owner_of_step(small: cst.BaseSmallStatement) -> str:
    """Return the owner of the method `step` that the statement calls, or an empty string.

    `optimizer.step();` and `optimizer.step( )` are the same as `optimizer.step()`.
    """
    if not isinstance(small, cst.Expr) or not isinstance(small.value, cst.Call):
        return ""
    func = small.value.func
    if not isinstance(func, cst.Attribute) or func.attr.value != "step":
        return ""
    return source(func.value)
