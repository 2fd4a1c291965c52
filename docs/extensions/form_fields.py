"""What a person types, as the reference shows it: the description of a field, and types without what only forms need."""

import ast
from typing import Any

from griffe import Attribute, Docstring, Expr, ExprBinOp, ExprCall, ExprKeyword, ExprSubscript, ExprTuple, Extension, Function


class FormFields(Extension):
    """Reads `Field(default=…, description=…)` of models, and `Annotated[…]` of parameters."""

    def on_attribute(self, *, attr: Attribute, **_: Any) -> None:
        """Take the description for the field's docstring, and the default for its value."""
        if not isinstance(attr.value, ExprCall) or str(attr.value.function) != "Field":
            return
        arguments = {it.name: it.value for it in attr.value.arguments if isinstance(it, ExprKeyword)}
        if "description" in arguments:
            attr.docstring = Docstring(ast.literal_eval(str(arguments["description"])), lineno=attr.lineno, parent=attr)
        attr.value = arguments.get("default")

    def on_function(self, *, func: Function, **_: Any) -> None:
        """Show the type that a parameter has, without what is said to forms."""
        for parameter in func.parameters:
            parameter.annotation = _plain(parameter.annotation)


def _plain(annotation: str | Expr | None) -> str | Expr | None:
    if isinstance(annotation, ExprBinOp):
        return _plain_union(annotation)
    if not isinstance(annotation, ExprSubscript):
        return annotation
    inner = annotation.slice.elements[0] if isinstance(annotation.slice, ExprTuple) else annotation.slice
    return _plain(inner) if str(annotation.left) in ("Annotated", "SkipJsonSchema") else annotation


def _plain_union(union: ExprBinOp) -> str | Expr | None:
    left, right = _plain(union.left), _plain(union.right)
    return ExprBinOp(left, union.operator, right) if left is not None and right is not None else union
