"""What the names in a piece of Python stand for, as far as Ray's go."""

import ast
import re
from dataclasses import dataclass, field

from .equivalents import ATTRIBUTES, RETURNS, Equivalents

# Older ways to what has a shorter name today, and Tune's names for what a training has, too.
_OLDER = (
    (re.compile(r"^ray\.train\.v2\.api\.\w+\.(?=\w)"), "ray.train."),
    (
        re.compile(r"^ray\.train\.(?:v2\.)?(torch\.)?(?:base_trainer|config|context|torch_trainer|train_loop_utils)\.(?=\w)"),
        r"ray.train.\1",
    ),
    (re.compile(r"^ray\.air\.(?:config|session|checkpoint|result)\.(?=\w)"), "ray.train."),
    (
        re.compile(r"^ray\.air\.(?=(?:Checkpoint|CheckpointConfig|FailureConfig|Result|RunConfig|ScalingConfig)\b)"),
        "ray.train.",
    ),
    (re.compile(r"^ray\.train\.(?:data_parallel_trainer\.)?DataParallelTrainer\b"), "ray.train.torch.TorchTrainer"),
    (
        re.compile(
            r"^ray\.tune\.(?=(?:Checkpoint|CheckpointConfig|FailureConfig|Result|RunConfig|get_checkpoint|get_context|report)\b)"
        ),
        "ray.train.",
    ),
    (re.compile(r"^ray\.train\.(?=get_(?:world|local|node|experiment|trial)_)"), "ray.train.TrainContext."),
)


def modern(name: str) -> str:
    """Return the name that a function or class of Ray's has today."""
    for pattern, replacement in _OLDER:
        name = pattern.sub(replacement, name)
    return name


@dataclass(frozen=True, slots=True)
class Meaning:
    """What an expression stands for.

    Attributes:
        name: Ray's dotted name of it, or of its class; with "[]" for each list or tuple around such.
        is_value: Whether it is an object of that class, not the class, function or module itself.

    """

    name: str
    is_value: bool = False

    def element(self) -> "Meaning | None":
        """Return what it is a list of."""
        return Meaning(self.name.removesuffix("[]"), is_value=True) if self.name.endswith("[]") else None


@dataclass(slots=True)
class Scope:
    """The names of a module, a class or a function; a name that is bound to something else stands for None.

    Attributes:
        equivalents: Knows what is in a module that was imported with a star.
        outer: The scope around it.
        is_class: Whether functions inside do not see its names.

    """

    equivalents: Equivalents
    outer: "Scope | None" = None
    is_class: bool = False
    _names: dict[str, Meaning | None] = field(default_factory=dict)
    _starred: list[str] = field(default_factory=list)

    def bind(self, name: str, meaning: Meaning | None) -> None:
        """Let `name` stand for `meaning` from here on."""
        self._names[name] = meaning

    def bind_all_of(self, module: str) -> None:
        """Let the names of a module stand for themselves, as after `from module import *`."""
        self._starred.append(module)

    def find(self, name: str) -> Meaning | None:
        """Return what `name` stands for; None for anything but Ray's."""
        if name in self._names:
            return self._names[name]
        for full_name in (modern(f"{module}.{name}") for module in self._starred):
            if self.equivalents.has(full_name) or self.equivalents.leads_on(full_name):
                return Meaning(full_name)
        return None if self.outer is None else self.outer.find(name)

    def inside(self, *, is_class: bool = False) -> "Scope":
        """Return a new scope in this one."""
        outer = self.outer if self.is_class and not is_class else self
        return Scope(self.equivalents, outer, is_class)

    def meaning(self, node: ast.expr) -> Meaning | None:
        """Return what an expression stands for; None for anything but Ray's."""
        match node:
            case ast.Name():
                found = self.find(node.id)
            case ast.Attribute():
                found = self._meaning_of_attribute(node)
            case ast.Call():
                called = self.meaning(node.func)
                found = None if called is None or called.is_value else self._meaning_of_call(called.name)
            case ast.Subscript():
                whole = self.meaning(node.value)
                found = None if whole is None else whole.element()
            case ast.NamedExpr():
                found = self.meaning(node.value)
            case ast.IfExp():
                found = self.meaning(node.body) or self.meaning(node.orelse)
            case _:
                found = None
        return found

    def annotated(self, annotation: ast.expr) -> Meaning | None:
        """Return an object of the class that an annotation names, also in `X | None` and `Optional[X]`."""
        if isinstance(annotation, ast.BinOp):
            return self.annotated(annotation.left) or self.annotated(annotation.right)
        if isinstance(annotation, ast.Subscript):
            return self.annotated(annotation.slice)
        meaning = self.meaning(annotation)
        return None if meaning is None else self._meaning_of_call(meaning.name)

    def _meaning_of_attribute(self, node: ast.Attribute) -> Meaning | None:
        owner = self.meaning(node.value)
        if owner is None or owner.name.endswith("[]"):
            return None
        name = modern(f"{owner.name}.{node.attr}")
        if name in ATTRIBUTES:
            return Meaning(ATTRIBUTES[name], is_value=True)
        # Of an object only methods lead on to Ray's: result.metrics is a dict like any other.
        return Meaning(name) if not owner.is_value or name in RETURNS else None

    def _meaning_of_call(self, name: str) -> Meaning | None:
        if name in RETURNS:
            return Meaning(RETURNS[name], is_value=True)
        is_class = name.rpartition(".")[2][:1].isupper() and self.equivalents.leads_on(name)
        return Meaning(name, is_value=True) if is_class else None
