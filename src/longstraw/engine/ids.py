"""Token ids as a user passes them, in whatever holds numbers, as tensors that are the library's own."""

from __future__ import annotations

from typing import Any

import torch


def token_ids(what: str, ids: Any) -> torch.Tensor:
    """A 1-D int64 tensor on the CPU, a copy.

    Raises:
        ValueError: not one-dimensional, or not whole numbers.
    """
    try:
        tensor = torch.as_tensor(ids).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{what} is a {type(ids).__name__} that makes no tensor ({error}): pass one-dimensional token ids, such as "
            "tokenizer(text).input_ids"
        ) from error
    if tensor.numel() == 0:
        tensor = tensor.long()
    if tensor.dim() != 1:
        raise ValueError(f"{what} has shape {tuple(tensor.shape)}: pass one-dimensional token ids")
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise ValueError(f"{what} has dtype {tensor.dtype}: pass whole-number token ids")
    return tensor.to(torch.long, copy=True)  # the caller may go on writing to what it passed


def mask(what: str, values: Any, num_tokens: int) -> torch.Tensor:
    """A bool tensor [num_tokens] on the CPU.

    Raises:
        ValueError: another shape, or values beside true and false, 1 and 0.
    """
    try:
        tensor = torch.as_tensor(values).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{what} is a {type(values).__name__} that makes no tensor ({error}): pass one truth value a token"
        ) from error
    if tensor.shape != (num_tokens,):
        raise ValueError(
            f"{what} has shape {tuple(tensor.shape)} for {num_tokens} tokens: pass one truth value a token"
        )
    if tensor.dtype != torch.bool and not bool(((tensor == 0) | (tensor == 1)).all()):
        raise ValueError(f"{what} holds other values than 0 and 1: it says of each token whether it is scored")
    return tensor.to(torch.bool, copy=True)


def refuse_outside(what: str, ids: torch.Tensor, vocab_size: int) -> None:
    """Refuses ids that the model has no embedding for.

    Raises:
        ValueError: names the first of them.
    """
    bad = ((ids < 0) | (ids >= vocab_size)).nonzero()
    if len(bad):
        place = int(bad[0])
        raise ValueError(
            f"{what} holds id {int(ids[place])} at place {place}, outside the vocabulary of {vocab_size}: "
            "was it made by another tokenizer, or padded with a negative label?"
        )
