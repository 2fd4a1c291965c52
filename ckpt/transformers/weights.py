"""A model's weights from a directory of Transformers' Trainer.

Part of `prefect_torch.ckpt.transformers.callback`.
"""

import json
from pathlib import Path

from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME


def load_renamed_weights(model: object, folder: Path) -> None:
    """Load the weights that `save_pretrained` stored in `folder` under other names than the `model` has for them.

    `save_pretrained` renames them for older versions, and `from_pretrained` translates them back.
    `Trainer.train(resume_from_checkpoint=)` does not: it warns, and continues with those weights as they were initialised
    (https://github.com/huggingface/transformers/issues/43701). Costs the model once more in memory, and nothing where all
    names are the same.
    """
    if not isinstance(model, PreTrainedModel):
        return
    if not _stored_names(folder) <= model.state_dict().keys():
        model.load_state_dict(type(model).from_pretrained(folder).state_dict())


def _stored_names(folder: Path) -> set[str]:
    if (index := folder / SAFE_WEIGHTS_INDEX_NAME).exists():
        return set(json.loads(index.read_text())["weight_map"])
    if not (weights := folder / SAFE_WEIGHTS_NAME).exists():  # adapters, or a format of a strategy that loads it itself
        return set()
    with safe_open(weights, framework="np") as file:
        return set(file.keys())
