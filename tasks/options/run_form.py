"""How the forms of the Prefect UI show the options of a training."""

import inspect
import warnings
from difflib import get_close_matches
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast, get_type_hints

from prefect_torch.ckpt.text import show_class
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    GetPydanticSchema,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic.functional_validators import ModelWrapValidatorHandler  # in pydantic itself only from 2.12 on
from pydantic.json_schema import JsonSchemaValue, SkipJsonSchema
from pydantic_core import CoreSchema, ErrorDetails, InitErrorDetails, PydanticCustomError
from pydantic_core.core_schema import is_instance_schema
from typing_extensions import Self

# A path in code, where a form takes its text. With InstanceOf[Path], the error of any other object names all of pydantic's ways
# to a path.
PathObject = SkipJsonSchema[Annotated[Path, GetPydanticSchema(lambda *_: is_instance_schema(Path))]]


def shown_as(title: str, description: str, **more: Any) -> Any:
    """Return the field of a flow's parameter with a title and a description that Prefect does not overwrite.

    Args:
        title: Above the input.
        description: Below the title.
        more: Further keys of the parameter's JSON schema.

    """
    return Field(json_schema_extra={"title": title, "description": description, **more})


class _PlainParameter(inspect.Parameter):
    """A parameter that is printed without the metadata of `Annotated`; the annotation itself stays."""

    def __str__(self) -> str:
        plain = get_type_hints(SimpleNamespace(__annotations__={self.name: self.annotation}))[self.name]
        return str(inspect.Parameter(self.name, self.kind, default=self.default, annotation=plain))


def plain_signature(signature: inspect.Signature) -> inspect.Signature:
    """Return an equal signature that `help()` prints in types alone; Prefect and pydantic read the same annotations of it."""
    parameters = [
        _PlainParameter(it.name, it.kind, default=it.default, annotation=it.annotation) for it in signature.parameters.values()
    ]
    return signature.replace(parameters=parameters)


def none_if_empty(value: Any) -> Any:
    """Return None for an empty text: a form shows the input of a parameter whose default is None only if it is given ""."""
    return None if value == "" else value


_ARGUMENTS = {"scaling", "run", "checkpoint", "failure", "search"}  # of the flows, by the names of their configs
_CLOSE = 0.73  # names that are less similar are not confused: num_samples is no sampler


class WithoutNull:
    """Marks a parameter that may be None and has no other default: forms show its input, not a button that reveals it."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the schema without null."""
        return _without_null(handler(schema))


def show_what_may_be_empty(schema: JsonSchemaValue) -> None:
    """Let forms show the optional inputs of a model, as `WithoutNull` does for a parameter."""
    for name, field in schema["properties"].items():
        if field.get("default", field) is None:
            # Without a default, Prefect's API still accepts null.
            shown = {key: value for key, value in field.items() if key != "default"}
            # A form fills in the defaults of a group within a group, and then demands the inputs that have none.
            is_group = any("$ref" in choice for choice in shown.get("anyOf", ()))
            schema["properties"][name] = _null_first(shown) if is_group else _without_null(shown)


def _without_null(schema: JsonSchemaValue) -> JsonSchemaValue:
    """Return the schema of one value without null; for a model, whose inputs a form would demand, null is the first choice."""
    values = _values(schema)
    if any("properties" in value for value in values):
        return _null_first(schema)
    (value,) = values
    return {**{key: value for key, value in schema.items() if key != "anyOf"}, **value}


def _null_first(schema: JsonSchemaValue) -> JsonSchemaValue:
    """Return the schema with null as its first choice, which a form shows chosen."""
    return {**schema, "anyOf": [{"type": "null", "title": "None"}, *_values(schema)]}


def _values(schema: JsonSchemaValue) -> list[JsonSchemaValue]:
    return [choice for choice in schema["anyOf"] if choice != {"type": "null"}]


class FormModel(BaseModel):
    """A model whose fields are inputs of a form."""

    # Errors do not quote the value that they refuse: it may contain a password.
    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra=show_what_may_be_empty, hide_input_in_errors=True)
    # What to write instead of fields that other frameworks' configs have.
    _instead_of: ClassVar[dict[str, str]] = {}

    if not TYPE_CHECKING:  # a type checker knows the signature from the fields

        def __new__(cls, *unnamed: Any, **_: Any) -> Self:
            """Return a new config; raise TypeError for fields without names, which a dataclass would accept."""
            if unnamed:
                given = ", ".join(f"{name}=…" for name, _ in zip(cls.model_fields, unnamed, strict=False))
                raise TypeError(f"{cls.__name__} takes its fields by name only: {cls.__name__}({given})")
            return super().__new__(cls)

    def __setstate__(self, state: dict[Any, Any]) -> None:
        """Restore a pickled config; the fields that an older version's pickle does not have get their defaults."""
        super().__setstate__(state)
        for name, field in type(self).model_fields.items():
            vars(self).setdefault(name, field.get_default(call_default_factory=True))

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Let `help()` print the inputs with their types alone."""
        cls.__signature__ = plain_signature(inspect.signature(cls))

    def _warn_of_default(self, field: str, message: str) -> None:
        """Warn, from a validator, of a probably unintended default; once, though a flow validates its arguments again."""
        warnings.warn(message, stacklevel=4)
        self.model_fields_set.add(field)

    @model_validator(mode="before")
    @classmethod
    def _take_empty_texts(cls, values: Any) -> Any:
        """Return the inputs without empty texts where None is the default: a form gives "" for an empty input."""
        if not isinstance(values, dict):
            return values
        fields = cls.model_fields
        return {name: it for name, it in values.items() if it != "" or name not in fields or fields[name].default is not None}

    @model_validator(mode="wrap")
    @classmethod
    def _name_known_inputs(cls, values: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        """Add to the error of an unknown input the one that may be meant, or to that of a wrong object its class."""
        try:
            return handler(values)
        except ValidationError as exc:
            errors = exc.errors(include_url=False, include_input=False)
            if all(error["type"] not in ("extra_forbidden", "model_type") for error in errors):
                raise
            raise ValidationError.from_exception_data(
                exc.title,
                [
                    InitErrorDetails(
                        type=PydanticCustomError(
                            cast("Any", error["type"]), "{message}", {"message": error["msg"] + cls._hint(error, values)}
                        ),
                        loc=error["loc"],
                        input=None,
                    )
                    for error in errors
                ],
                hide_input=True,
            ) from None

    @classmethod
    def _hint(cls, error: ErrorDetails, values: Any) -> str:
        if error["type"] == "model_type" and not error["loc"]:  # Ray's configs have the same names
            return f", not {show_class(values)}"
        name, *below = map(str, error["loc"] or ("",))
        if error["type"] != "extra_forbidden" or below:
            return ""
        if name in cls._instead_of:
            return f"; {cls._instead_of[name]}"
        within = [field for field in cls.model_fields if f"_{field}_" in f"_{name}_"]  # grace_s in preemption_grace_s
        if not within and isinstance(values, dict) and isinstance(given := values.get(name), FormModel):
            kind = type(given).__name__
            if (argument := kind.removesuffix("Config").lower()) in _ARGUMENTS:
                return f"; give the flow {argument}={kind}(...)"
        nearest = sorted(within, key=len)[-1:] or get_close_matches(name, cls.model_fields, 1, _CLOSE)
        return f"; is {nearest[0]!r} meant?" if nearest else f"; there are {', '.join(cls.model_fields)}"

    @model_serializer(mode="wrap")
    def _leave_out_what_is_empty(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the parameters of a deployment without null, which a form does not accept for a choice."""
        return {name: value for name, value in handler(self).items() if value is not None}
