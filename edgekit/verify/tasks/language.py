"""What a language model makes of a text: how well it foresees each token, and whether it would have said it."""

from collections.abc import Callable, Sequence

import numpy as np

from edgekit.errors import DataError
from edgekit.model.tensors import Array
from edgekit.verify.tasks.detection import Weights


def read_token_losses(scores: Array, label: Array) -> tuple[float, float]:
    """Returns the sum of -log p of the tokens of a text and how many there are, from scores [..., tokens, words].

    `label` holds the token that each position is to foresee; a negative one does not count.

    Raises:
        DataError: the scores do not fit the label, or a token is no word of theirs.
    """
    chosen, wanted = _match(scores, label)
    chosen = chosen.astype(np.float64)
    highest = chosen.max(axis=1, initial=-np.inf)
    spread = np.log(np.exp(chosen - highest[:, None]).sum(axis=1)) + highest
    return float((spread - chosen[np.arange(len(wanted)), wanted]).sum()), float(len(wanted))


def read_next_tokens(scores: Array, label: Array) -> tuple[float, float]:
    """Returns for how many tokens of a text the best score is theirs, and how many there are.

    Raises:
        DataError: the scores do not fit the label, or a token is no word of theirs.
    """
    chosen, wanted = _match(scores, label)
    hits = chosen.argmax(axis=1) == wanted if len(wanted) else np.zeros(0)
    return float(np.count_nonzero(hits)), float(len(wanted))


def prepare_perplexity(records: Sequence[tuple[float, float]]) -> Callable[[Weights], float]:
    """Returns the scorer of the perplexity: e to the mean of -log p over all tokens."""
    table = np.array(records, dtype=np.float64).reshape(-1, 2)

    def score(weights: Weights) -> float:
        losses, tokens = weights @ table
        return float(np.exp(min(losses / tokens, 700.0))) if tokens else 1.0

    return score


def _match(scores: Array, label: Array) -> tuple[Array, Array]:
    """Returns the scores [tokens, words] of the positions that count, and the tokens there."""
    wanted = np.asarray(label).reshape(-1)
    words = scores.shape[-1] if scores.ndim > 1 else 0
    if wanted.dtype.kind not in "iu" or not words or scores.size != wanted.size * words:
        raise DataError(
            f"scores {list(scores.shape)} do not fit a text of {wanted.size} tokens", hint="a token for each position"
        )
    counted = wanted >= 0
    if wanted.max(initial=0) >= words:
        raise DataError(f"token {wanted.max()} is no word of {words}", hint="tokens count from 0")
    return scores.reshape(-1, words)[counted], wanted[counted].astype(np.int64)
