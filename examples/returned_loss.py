"""A model that computes its loss, as nanoGPT and Hugging Face models do. From the folder of this file:

paceline train --model returned_loss:Bigram --data stories --context 64 --metrics bits_per_byte,accuracy \
    --optimizer adamw --lr 0.1 --nproc-per-node 2 --strategy overlap
"""  # noqa: E501

from torch import Tensor, nn
from torch.nn import functional as F


class Bigram(nn.Module):
    """Predicts a token from the one before."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.scores = nn.Embedding(classes, classes)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """A forward pass with a parameter `targets`, or `labels`, gets them and returns the loss.

        It may return the loss alone, (outputs, loss), or a dict with "loss" and "logits". Metrics
        need the outputs.
        """
        logits = self.scores(tokens)
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss
