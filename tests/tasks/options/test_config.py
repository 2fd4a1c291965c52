import warnings

import pytest
from prefect_torch.flows import train
from prefect_torch.tasks import CheckpointConfig


@pytest.mark.parametrize("score", ["loss", "val_loss", "eval/Loss"])
def test_a_loss_without_an_order_warns_where_it_is_given(score):
    with pytest.warns(UserWarning, match=f"'{score}' looks like a loss.* keeps the worst of it") as caught:
        CheckpointConfig(checkpoint_score_attribute=score)
    assert [it.filename for it in caught] == [__file__]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"checkpoint_score_attribute": "accuracy"},
        {"checkpoint_score_attribute": "losses/accuracy"},
        {"checkpoint_score_attribute": "loss", "checkpoint_score_order": "min"},
        {"checkpoint_score_attribute": "loss", "checkpoint_score_order": "max"},
    ],
)
def test_other_scores_and_a_given_order_warn_of_nothing(fields):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CheckpointConfig(**fields)


def test_a_flow_that_validates_its_arguments_again_repeats_no_warning():
    with pytest.warns(UserWarning, match="looks like a loss"):
        given = CheckpointConfig(checkpoint_score_attribute="loss")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = train.validate_parameters({"train_fn": "module:function", "checkpoint": given})
    assert again["checkpoint"] == given
