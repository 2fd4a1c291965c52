"""The tags that task runs inherit, whose concurrency limits they wait for."""

from prefect.context import TagsContext, TaskRunContext


def tags_beyond_caller() -> TagsContext:
    """Return a context whose task runs do not inherit the tags of the task that calls the current flow, if a task does.

    Where such a tag has a concurrency limit, the calling task holds the slot that they would wait for: its slot counts them.
    """
    caller = TaskRunContext.get()
    held = set[str]() if caller is None else set(caller.task_run.tags)
    return TagsContext(current_tags=TagsContext.get().current_tags - held)
