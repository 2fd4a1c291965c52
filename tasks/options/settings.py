"""The settings of a site for all of its trainings, in Prefect's variables, profiles or prefect.toml."""

from dataclasses import replace

from prefect.settings.base import PrefectBaseSettings, build_settings_config
from prefect_torch.ckpt import StorageSpec
from prefect_torch.ckpt.storage.opening import StorageLike, parse_storage
from prefect_torch.ckpt.storage.protocol import RetryPolicy
from pydantic import Field


class TorchSettings(PrefectBaseSettings):
    """Settings of this package: `PREFECT_INTEGRATIONS_TORCH_…`, or `[integrations.torch]` in prefect.toml."""

    model_config = build_settings_config(("integrations", "torch"))

    storage_deadline_s: float = Field(
        default=RetryPolicy().deadline_s,
        ge=0,
        description="For how many seconds operations on a storage that does not answer are retried.",
    )
    storage_first_wait_s: float = Field(
        default=RetryPolicy().first_wait_s, ge=0, description="The longest first pause between two tries, in seconds."
    )
    storage_longest_wait_s: float = Field(
        default=RetryPolicy().longest_wait_s, ge=0, description="What a pause between two tries grows to at most, in seconds."
    )

    def retry_policy(self) -> RetryPolicy:
        """Return the retry policy of storage operations."""
        return RetryPolicy(self.storage_deadline_s, self.storage_first_wait_s, self.storage_longest_wait_s)


def configured_storage(storage: StorageLike, deadline_s: float | None = None) -> StorageSpec:
    """Return what every process needs to open `storage`, with the retry policy of the settings.

    Args:
        storage: A path, a URL, "block-type-slug/block-name", or a block; a spec keeps its retry policy.
        deadline_s: Replaces the setting.

    """
    if isinstance(storage, StorageSpec):
        return storage
    policy = TorchSettings().retry_policy()
    return replace(parse_storage(storage), retry=policy if deadline_s is None else replace(policy, deadline_s=deadline_s))
