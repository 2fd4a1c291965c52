"""The settings of a site for all trainings."""

from prefect.settings.base import PrefectBaseSettings, build_settings_config
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
        default=RetryPolicy().longest_wait_s, ge=0, description="The longest pause between two tries, in seconds."
    )

    fork_ranks: bool = Field(
        default=True,
        description="Whether ranks are forked from a process that has imported torch; if not, each imports it for itself.",
    )

    def retry_policy(self) -> RetryPolicy:
        """Return the retry policy of storage operations."""
        return RetryPolicy(self.storage_deadline_s, self.storage_first_wait_s, self.storage_longest_wait_s)
