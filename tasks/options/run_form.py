"""How Prefect's forms show what a person says about a training."""

from typing import Any

from pydantic import Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema


def shown_as(title: str, description: str, **more: Any) -> Any:
    """Return the field of a flow's parameter that forms show so: Prefect writes its name and docstring over a field's own.

    Args:
        title: Above the input.
        description: Below the title.
        more: What else the parameter's JSON schema says.

    """
    return Field(json_schema_extra={"title": title, "description": description, **more})


def none_if_empty(value: Any) -> Any:
    """Return None for a text that was left empty: where a parameter's default is None, a form needs "" to show its input."""
    return None if value == "" else value


class WithoutNull:
    """Marks what may be None and has no other default: forms show its input, instead of a button to get at it."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the schema of what it is otherwise."""
        return _without_null(handler(schema))


def show_what_may_be_empty(schema: JsonSchemaValue) -> None:
    """Let forms show a model's optional inputs, as `WithoutNull` does a parameter's."""
    for name, field in schema["properties"].items():
        if field.get("default", field) is None:
            # Prefect's API still takes null, which it does where there is no default.
            schema["properties"][name] = _without_null({key: value for key, value in field.items() if key != "default"})


def _without_null(schema: JsonSchemaValue) -> JsonSchemaValue:
    (value,) = (choice for choice in schema["anyOf"] if choice != {"type": "null"})
    return {**{key: value for key, value in schema.items() if key != "anyOf"}, **value}
