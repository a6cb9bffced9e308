"""Your own metrics, recorded, shown and compared like the accuracy. From the folder of this file:

paceline train --model own_model:Wide --data own_model:rings --metrics own_metric:f1,own_metric:confidence
"""  # noqa: E501

from torch import Tensor


def f1(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """F1 score of the last class.

    A metric is evaluated on batches of the test set, on every worker. Sums and counts add up over
    all of them; ratios of batches do not. So a metric returns a sum and a count.
    """
    last = outputs.shape[-1] - 1
    is_found, is_right = outputs.argmax(-1) == last, targets == last
    return 2 * (is_found & is_right).sum(), is_found.sum() + is_right.sum()


def confidence(outputs: Tensor, targets: Tensor) -> Tensor:
    """Probability of the right class: one number is the mean over the samples of the batch."""
    return outputs.softmax(-1).gather(-1, targets.unsqueeze(-1)).mean()
