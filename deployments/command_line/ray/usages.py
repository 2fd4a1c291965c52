"""Which names of Ray a Python file uses, found in its text: the file is never imported or run."""

import ast
import io
import tokenize
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .equivalents import PARAMETERS, Equivalents
from .scopes import Meaning, Scope, modern

_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True, slots=True, order=True)
class Usage:
    """One use of a name.

    Attributes:
        line: Where, counted from 1.
        column: Where in the line, in characters from 1.
        name: Ray's dotted name, whatever it is called in the file.
        keyword: The argument, where it is an argument of a call of `name` that is used; else empty.
        value: The argument's value where it is a constant, "(…)" where it is a tuple; else empty.

    """

    line: int
    column: int
    name: str
    keyword: str = ""
    value: str = ""


def find_usages(source: bytes, equivalents: Equivalents) -> list[Usage]:
    """Return every use of a name of Ray in a file, in the file's order.

    Names are followed through imports, assignments, annotations, `for`, `:=` and what calls return; not through containers,
    attributes of other objects, `getattr`, texts, or other files.

    Args:
        source: The file's bytes; a coding cookie counts.
        equivalents: Tells modules from what is in them.

    Raises:
        SyntaxError: If it is no Python of this interpreter's version.
        UnicodeDecodeError: If it is not encoded as it says, or in UTF-8 where it says nothing.

    """
    encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
    text = io.StringIO(source.decode(encoding), newline=None).read()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an invalid escape in the file is not this program's to tell
        tree = ast.parse(text)
    finder = _Finder(text.split("\n"), Scope(equivalents))
    finder.look_through(tree)
    return sorted(finder.usages)


class _Finder(ast.NodeVisitor):
    def __init__(self, lines: Sequence[str], scope: Scope) -> None:
        self.usages: set[Usage] = set()
        self._lines = lines
        self._scope = scope
        self._equivalents = scope.equivalents
        self._bodies: deque[tuple[_Function, Scope]] = deque()
        self._unused: dict[str, Usage] = {}  # imports, by the name they bind

    def look_through(self, tree: ast.Module) -> None:
        """Collect the uses of a whole file."""
        self._visit_all(tree.body)
        while self._bodies:  # functions run after what is around them has all its names
            function, self._scope = self._bodies.popleft()
            self._visit_all(function.body if isinstance(function.body, list) else [function.body])
        self.usages.update(self._unused.values())

    # What a name stands for.

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            top = alias.name.partition(".")[0]
            meaning = Meaning(alias.name if alias.asname else top) if top == "ray" else None
            self._scope.bind(alias.asname or top, meaning)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        is_of_ray = node.level == 0 and (node.module or "").partition(".")[0] == "ray"
        for alias in node.names:
            if is_of_ray and alias.name == "*":
                self._scope.bind_all_of(str(node.module))
            elif is_of_ray:
                name = modern(f"{node.module}.{alias.name}")
                self._scope.bind(alias.asname or alias.name, Meaning(name))
                if self._is_worth_a_line(name):
                    self._unused[alias.asname or alias.name] = Usage(*self._place(alias), name)
            else:
                self._scope.bind(alias.asname or alias.name, None)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._bind(target, node.value, self._scope.meaning(node.value))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit(node.annotation)
        meaning = self._scope.annotated(node.annotation)
        if node.value is not None:
            self.visit(node.value)
            meaning = self._scope.meaning(node.value) or meaning
        self._bind(node.target, None, meaning)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self._bind(node.target, node.value, self._scope.meaning(node.value))

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        self._bind_each(node.target, node.iter)
        self._visit_all([*node.body, *node.orelse])

    def visit_AsyncFor(self, node: ast.AsyncFor) -> None:
        self.visit_For(node)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            self.visit(item.context_expr)
            if item.optional_vars is not None:
                self._bind(item.optional_vars, None, None)
        self._visit_all(node.body)

    def visit_AsyncWith(self, node: ast.AsyncWith) -> None:
        self.visit_With(node)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.type is not None:
            self.visit(node.type)
        if node.name is not None:
            self._scope.bind(node.name, None if node.type is None else self._scope.annotated(node.type))
        self._visit_all(node.body)

    def visit_ListComp(self, node: ast.ListComp) -> None:
        self._visit_comprehension(node.generators, node.elt)

    def visit_SetComp(self, node: ast.SetComp) -> None:
        self._visit_comprehension(node.generators, node.elt)

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> None:
        self._visit_comprehension(node.generators, node.elt)

    def visit_DictComp(self, node: ast.DictComp) -> None:
        self._visit_comprehension(node.generators, node.key, node.value)

    def _visit_comprehension(self, generators: Sequence[ast.comprehension], *elements: ast.expr) -> None:
        outer, self._scope = self._scope, self._scope.inside()
        for generator in generators:
            self.visit(generator.iter)
            self._bind_each(generator.target, generator.iter)
            self._visit_all(generator.ifs)
        self._visit_all(elements)
        self._scope = outer

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_all([*node.decorator_list, *node.bases, *node.keywords])
        self._scope.bind(node.name, None)
        outer, self._scope = self._scope, self._scope.inside(is_class=True)
        self._visit_all(node.body)
        self._scope = outer

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._visit_all([*node.decorator_list, node.args, *([node.returns] if node.returns else [])])
        self._scope.bind(node.name, None)
        self._defer(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.args)
        self._defer(node)

    def _defer(self, function: _Function) -> None:
        scope = self._scope.inside()
        arguments = function.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
            if argument is not None:
                scope.bind(argument.arg, None if argument.annotation is None else self._scope.annotated(argument.annotation))
        self._bodies.append((function, scope))

    def _bind(self, target: ast.expr, value: ast.expr | None, meaning: Meaning | None) -> None:
        if isinstance(target, ast.Name):
            if not (isinstance(value, ast.Constant) and value.value is None):  # `checkpoint = None`, for now
                self._scope.bind(target.id, meaning)
        elif isinstance(target, (ast.Tuple, ast.List)):
            first = None if meaning is None else meaning.element()
            for number, element in enumerate(target.elts):
                self._bind(element, None, first if number == 0 else None)
        else:
            self.visit(target)

    def _bind_each(self, target: ast.expr, iterated: ast.expr) -> None:
        meaning = self._scope.meaning(iterated)
        self._bind(target, None, None if meaning is None else meaning.element())

    # Where it is used.

    def visit_Name(self, node: ast.Name) -> None:
        meaning = self._scope.find(node.id)
        if meaning is not None:
            self._unused.pop(node.id, None)
            if not meaning.is_value:
                self._add(self._place(node), meaning.name)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        owner = self._scope.meaning(node.value)
        if owner is None or owner.name.endswith("[]"):
            self.visit(node.value)
            return
        name = modern(f"{owner.name}.{node.attr}")
        root = _root(node.value)
        if root is not None and (
            not owner.is_value or isinstance(node.value, ast.Name)
        ):  # ray.train.report, context.get_world_rank
            self._unused.pop(root.id, None)
            self._add(self._place(node), name)
        else:  # get_context().get_world_rank, result.checkpoint.path: two names, of which this is the second
            self.visit(node.value)
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            self._add(self._at(node.end_lineno, node.end_col_offset - len(node.attr.encode())), name)

    def visit_Call(self, node: ast.Call) -> None:
        self.visit(node.func)
        called = self._scope.meaning(node.func)
        if called is not None and not called.is_value and self._equivalents.has(called.name):
            for keyword, value in zip(PARAMETERS.get(called.name, ()), node.args, strict=False):
                self.usages.add(Usage(*self._place(value), called.name, keyword, _shown(value)))
            for given in node.keywords:
                if given.arg is not None:
                    self.usages.add(Usage(*self._place(given), called.name, given.arg, _shown(given.value)))
        self._visit_all([*node.args, *(given.value for given in node.keywords)])

    def _add(self, place: tuple[int, int], name: str) -> None:
        if self._is_worth_a_line(name):
            self.usages.add(Usage(*place, name))

    def _is_worth_a_line(self, name: str) -> bool:
        return self._equivalents.has(name) or not self._equivalents.leads_on(name)

    def _place(self, node: ast.expr | ast.alias | ast.keyword) -> tuple[int, int]:
        return self._at(node.lineno, node.col_offset)

    def _at(self, line: int, offset: int) -> tuple[int, int]:
        before = self._lines[line - 1].encode()[:offset]  # the parser counts bytes
        return line, len(before.decode()) + 1

    def _visit_all(self, nodes: Sequence[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)


def _root(node: ast.expr) -> ast.Name | None:
    """Return the name that a dotted name begins with; None for any other expression."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node if isinstance(node, ast.Name) else None


def _shown(value: ast.expr) -> str:
    if isinstance(value, ast.Tuple):
        return "(…)"
    return ast.unparse(value) if isinstance(value, ast.Constant) else ""
