"""The configuration of a directory that a command or a function copies to where other machines reach it."""

from collections.abc import Callable
from typing import Annotated, Any

from prefect_torch.ckpt.runs.layout import RUN_NAME
from prefect_torch.ckpt.storage.synced.transport import FUNCTION, PLACEHOLDERS, Transport, pickled_function
from prefect_torch.ckpt.text import in_partials, name_of
from prefect_torch.tasks.rank.user_code.code_pickle import dump
from pydantic import Field, PlainSerializer, field_validator
from pydantic.json_schema import SkipJsonSchema

from .run_form import FormModel

# If a killed process has not copied them, the next one on its machine does. No logs of an evaluation: one that fails stores
# nothing later.
_LATE = rf"{RUN_NAME}/(metrics/.*|logs/.*|latest\.json)"

# Prefect stores a flow run's parameters as JSON, to be shown; the flow gets the function itself.
_Shown = PlainSerializer(lambda it: f"{in_partials(it).__module__}:{name_of(it)}", when_used="json")
_Function = SkipJsonSchema[Annotated[Callable[[str, str], Any], _Shown]]


class SyncConfig(FormModel):
    """How each node's directory is copied to and from a storage that only a tool reaches."""

    upload: Annotated[str, Field(title="Command or function")] | _Function = Field(
        title="Upload",
        description="A command such as rsync -a {source} {target}, or module:function. It merges the directory {source} of "
        "this machine into {target}, which is the field below.",
    )
    download: Annotated[str, Field(title="Command or function")] | _Function = Field(
        title="Download", description="The same, from {source}, a directory in the target, to the directory {target} here."
    )
    target: str = Field(
        min_length=1, title="Target", description="Where the tool copies to, in its own words, such as me@host:/checkpoints."
    )
    period_s: float = Field(
        default=10.0,
        ge=0,
        allow_inf_nan=False,
        title="Period (seconds)",
        description="After how long metrics and logs are copied at the latest. A checkpoint is copied before its commit.",
    )
    timeout_s: float = Field(
        default=600.0,
        gt=0,
        allow_inf_nan=False,
        title="Timeout (seconds)",
        description="How long one call may take; then it is killed. More than the largest part of a checkpoint needs, and the "
        "download of the run at a start, with all checkpoints that retention has deleted here: the target keeps them.",
    )

    @field_validator("upload", "download")
    @classmethod
    def _check_template(cls, way: Any) -> Any:
        if not isinstance(way, str) or FUNCTION.fullmatch(way):
            return way
        missing = [name for name in PLACEHOLDERS if name not in way]
        if missing:
            raise ValueError(
                f"the command has no {' and no '.join(missing)}: give a template such as 'rsync -a {{source}} {{target}}', "
                "'module:function', or a function of (source, target)"
            )
        return way

    @field_validator("target")
    @classmethod
    def _check_target(cls, target: str) -> str:
        return target.rstrip("/") or "/"

    def transport(self) -> Transport:
        """Return the transport that every process of a training gets."""
        return Transport(_text(self.upload), _text(self.download), self.target, str(self.period_s), str(self.timeout_s), _LATE)


def _text(way: str | Callable[[str, str], Any]) -> str:
    return way if isinstance(way, str) else pickled_function(dump(way))
