"""Which names of Ray a Python file uses, found in its text: the file is never imported or run."""

import ast
import io
import tokenize
import warnings
from collections import ChainMap, deque
from collections.abc import Sequence
from dataclasses import dataclass

from .equivalents import ATTRIBUTES, ITEMS, PARAMETERS, RETURNS, Equivalents, modern

_SAME_ITEMS = frozenset({"list", "reversed", "sorted", "tuple"})
_ONE_ITEM = frozenset({"max", "min"})


@dataclass(frozen=True, slots=True, order=True)
class Usage:
    """One use of a name.

    Attributes:
        line: Its line, counted from 1.
        column: Its position in the line, in characters from 1.
        name: Ray's dotted name, also if the file calls it something else.
        keyword: The argument, if it is an argument of a call of `name` that is used; else empty.
        value: The argument's value if it is a constant, "(…)" if it is a tuple; else empty.

    """

    line: int
    column: int
    name: str
    keyword: str = ""
    value: str = ""


def find_usages(source: bytes, equivalents: Equivalents) -> list[Usage]:
    """Return every use of a name of Ray in a file, in the file's order.

    Names are followed through imports, assignments, annotations, `for`, `:=` and the results of calls, also of `enumerate`,
    `sorted`, `min` and the like, and of the file's own functions as far as they are annotated; not through containers,
    attributes of other objects, `getattr`, strings, or other files.

    Args:
        source: The file's bytes; a coding cookie is respected.
        equivalents: The names with rows.

    Raises:
        SyntaxError: If it is no Python of this interpreter's version.
        UnicodeDecodeError: If it is not in the encoding that it declares, or in UTF-8 if it declares none.

    """
    encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
    text = io.StringIO(source.decode(encoding), newline=None).read()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an invalid escape in the file is no concern of this program
        tree = ast.parse(text)
    scan = _Scan(text.split("\n"), equivalents)
    scan.run(tree)
    return sorted(scan.usages)


@dataclass(frozen=True, slots=True)
class _Meaning:
    """Ray's dotted name of an expression, or of the class of its value.

    It ends with "[]" for each list or tuple around the value, and with "()" if calling the value returns one of that class.
    """

    name: str
    is_value: bool = False

    @property
    def is_list(self) -> bool:
        return self.name.endswith("[]")


class _Scope(ChainMap[str, _Meaning | None]):
    """The names of a module, class or function, in front of those around it; None for everything that is not Ray's."""

    is_class = False

    def inside(self) -> "_Scope":
        """Return the scope of a function in this one, which does not see the names of a class."""
        return (self.parents if self.is_class else self).new_child()


class _Scan(ast.NodeVisitor):
    """Visits a file in the order of its execution: the bodies of functions come after the module."""

    def __init__(self, lines: Sequence[str], equivalents: Equivalents) -> None:
        self.usages: set[Usage] = set()
        self._lines = lines
        self._equivalents = equivalents
        self._names = _Scope()
        self._bodies: deque[tuple[Sequence[ast.AST], _Scope]] = deque()
        self._unused_imports: dict[str, Usage] = {}  # by the bound name

    def run(self, tree: ast.Module) -> None:
        """Collect the uses of a whole file."""
        self._bodies.append((tree.body, self._names))
        while self._bodies:
            body, self._names = self._bodies.popleft()
            self._visit_all(body)
        self.usages.update(self._unused_imports.values())

    # What a name means.

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            top = alias.name.partition(".")[0]
            self._names[alias.asname or top] = _Meaning(alias.name if alias.asname else top) if top == "ray" else None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = "" if node.level else str(node.module)
        for alias in node.names:
            bound, name = alias.asname or alias.name, modern(f"{module}.{alias.name}")
            if module.partition(".")[0] != "ray":
                self._names[bound] = None
            elif bound == "*":
                self._import_all(module)
            else:
                self._names[bound] = _Meaning(name)
                if self._is_worth_a_line(name):
                    self._unused_imports[bound] = Usage(*self._position(alias), name)

    def _import_all(self, module: str) -> None:
        for word in self._equivalents.words() - self._names.keys():
            name = modern(f"{module}.{word}")
            if self._equivalents.has(name) or self._equivalents.leads_on(name):
                self._names[word] = _Meaning(name)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            is_for_now = isinstance(node.value, ast.Constant) and node.value.value is None  # `checkpoint = None`
            if not (is_for_now and isinstance(target, ast.Name)):
                self._bind(target, self._meaning(node.value))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._visit_all([node.annotation, *([node.value] if node.value else [])])
        self._bind(node.target, (node.value and self._meaning(node.value)) or self._annotated(node.annotation))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self._bind(node.target, self._meaning(node.value))

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self._bind_each(node)
        self._visit_all([*node.body, *node.orelse])

    visit_AsyncFor = visit_For

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        outer, self._names = self._names, self._names.inside()
        for generator in node.generators:
            self._bind_each(generator)
            self._visit_all(generator.ifs)
        self._visit_all([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt])
        self._names = outer

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name is not None:
            self._names[node.name] = self._annotated(node.type)
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_all([*node.decorator_list, *node.bases, *node.keywords])
        self._names[node.name] = None
        outer, self._names = self._names, self._names.new_child()
        self._names.is_class = True
        self._visit_all(node.body)
        self._names = outer

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._visit_all([*node.decorator_list, node.args, *([node.returns] if node.returns else [])])
        returned = None if isinstance(node, ast.AsyncFunctionDef) else self._annotated(node.returns)
        self._names[node.name] = returned and _Meaning(f"{returned.name}()", is_value=True)
        self._defer(node.args, node.body)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.args)
        self._defer(node.args, [node.body])

    def _defer(self, arguments: ast.arguments, body: Sequence[ast.AST]) -> None:
        given = (child for child in ast.iter_child_nodes(arguments) if isinstance(child, ast.arg))
        scope = self._names.inside()
        scope.update({argument.arg: self._annotated(argument.annotation) for argument in given})
        self._bodies.append((body, scope))

    def _bind(self, target: ast.expr, meaning: _Meaning | None) -> None:
        if isinstance(target, ast.Name):
            self._names[target.id] = meaning
        elif isinstance(target, (ast.Tuple, ast.List)):
            for number, element in enumerate(target.elts):
                self._bind(element, _element(meaning) if number == 0 else None)
        else:
            self.visit(target)

    def _bind_each(self, loop: ast.For | ast.AsyncFor | ast.comprehension) -> None:
        self.visit(loop.iter)
        target, items = loop.target, loop.iter
        if isinstance(items, ast.Call) and self._builtin(items) == "enumerate" and isinstance(target, ast.Tuple):
            self._bind(target, None)
            target, items = target.elts[-1], items.args[0]
        self._bind(target, _element(self._meaning(items)))

    def _builtin(self, call: ast.Call) -> str:
        """Return the name of a built-in function that is called with arguments; else an empty string."""
        if not isinstance(call.func, ast.Name) or call.func.id in self._names or not call.args:
            return ""
        return call.func.id

    def _meaning(self, node: ast.expr) -> _Meaning | None:
        match node:
            case ast.Name():
                found = self._names.get(node.id)
            case ast.Attribute():
                owner, name = self._member(node)
                if name in ATTRIBUTES:
                    found = _Meaning(ATTRIBUTES[name], is_value=True)
                else:  # of a value, only methods lead on to Ray's: result.metrics is a dict like any other
                    leads_on = owner is not None and (not owner.is_value or name in RETURNS or name in PARAMETERS)
                    found = _Meaning(name) if leads_on else None
            case ast.Call() if self._builtin(node) in _SAME_ITEMS:
                element = _element(self._meaning(node.args[0]))
                found = element and _Meaning(f"{element.name}[]", is_value=True)
            case ast.Call() if self._builtin(node) in _ONE_ITEM:
                found = _element(self._meaning(node.args[0]))
            case ast.Call():
                found = self._called(self._meaning(node.func))
            case ast.Subscript():
                found = _element(self._meaning(node.value))
            case ast.NamedExpr():
                found = self._meaning(node.value)
            case ast.IfExp():
                found = self._meaning(node.body) or self._meaning(node.orelse)
            case _:
                found = None
        return found

    def _member(self, node: ast.Attribute) -> tuple[_Meaning | None, str]:
        """Return the owner of an attribute and the attribute's name, or None and an empty string if it is not Ray's."""
        owner = self._meaning(node.value)
        if owner is None or owner.name.endswith(("[]", "()")):
            return None, ""
        return owner, modern(f"{owner.name}.{node.attr}")

    def _called(self, called: _Meaning | None) -> _Meaning | None:
        """Return what calling a value returns."""
        if called is not None and called.name.endswith("()"):
            return _Meaning(called.name.removesuffix("()"), is_value=True)
        return None if called is None or called.is_value else self._returned(called.name)

    def _returned(self, name: str) -> _Meaning | None:
        if name in RETURNS:
            return _Meaning(RETURNS[name], is_value=True)
        is_class = name.rpartition(".")[2][:1].isupper() and self._equivalents.leads_on(name)
        return _Meaning(name, is_value=True) if is_class else None

    def _annotated(self, annotation: ast.expr | None) -> _Meaning | None:
        """Return a value of the class that an annotation names, also in `X | None` and `Optional[X]`."""
        if isinstance(annotation, ast.BinOp):
            return self._annotated(annotation.left) or self._annotated(annotation.right)
        if isinstance(annotation, ast.Subscript):
            return self._annotated(annotation.slice)
        meaning = None if annotation is None else self._meaning(annotation)
        return None if meaning is None else self._returned(meaning.name)

    # Where it is used.

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self._names[node.id] = None
        elif (meaning := self._names.get(node.id)) is not None:
            self._unused_imports.pop(node.id, None)
            if not meaning.is_value:
                self._add(self._position(node), meaning.name)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        owner, name = self._member(node)
        root = _root(node)
        if owner is None:
            self.visit(node.value)
        elif root is not None and (not owner.is_value or root is node.value):  # ray.train.report, context.get_world_rank
            self._unused_imports.pop(root.id, None)
            self._add(self._position(node), name)
        else:  # get_context().get_world_rank, result.checkpoint.path: two names, of which this is the second
            self.visit(node.value)
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            self._add(self._at(node.end_lineno, node.end_col_offset - len(node.attr.encode())), name)

    def visit_Call(self, node: ast.Call) -> None:
        self.visit(node.func)
        called = self._meaning(node.func)
        if called is not None and not called.is_value and self._equivalents.has(called.name):
            for keyword, value in zip(PARAMETERS.get(called.name, ()), node.args, strict=False):
                self.usages.add(Usage(*self._position(value), called.name, keyword, _shown(value)))
            for given in node.keywords:
                if given.arg is not None:
                    self.usages.add(Usage(*self._position(given), called.name, given.arg, _shown(given.value)))
        self._visit_all([*node.args, *(given.value for given in node.keywords)])

    def _add(self, position: tuple[int, int], name: str) -> None:
        if self._is_worth_a_line(name):
            self.usages.add(Usage(*position, name))

    def _is_worth_a_line(self, name: str) -> bool:
        return self._equivalents.has(name) or not self._equivalents.leads_on(name)

    def _position(self, node: ast.expr | ast.alias | ast.keyword) -> tuple[int, int]:
        return self._at(node.lineno, node.col_offset)

    def _at(self, line: int, offset: int) -> tuple[int, int]:
        before = self._lines[line - 1].encode()[:offset]  # the parser counts bytes
        return line, len(before.decode()) + 1

    def _visit_all(self, nodes: Sequence[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)


def _element(meaning: _Meaning | None) -> _Meaning | None:
    if meaning is None or not (meaning.is_list or (meaning.is_value and meaning.name in ITEMS)):
        return None
    return _Meaning(ITEMS.get(meaning.name) or meaning.name.removesuffix("[]"), is_value=True)


def _root(node: ast.expr) -> ast.Name | None:
    """Return the name that a dotted name begins with; None for any other expression."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node if isinstance(node, ast.Name) else None


def _shown(value: ast.expr) -> str:
    if isinstance(value, ast.Tuple):
        return "(…)"
    return ast.unparse(value) if isinstance(value, ast.Constant) else ""
