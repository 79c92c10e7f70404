"""One sequence being written: which token comes next, and when it ends.

Each sequence has its own parameters and its own random generator, so that what is written for a prompt does not depend
on what else is in the batch. `Sampler` and `Ending` are how `model.generate` asks a batch of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.generation import LogitsProcessor, StoppingCriteria

from weightloaders.errors import ModelError
from weightloaders.llm.outputs import CompletionOutput

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    from weightloaders.llm.outputs import Request

_MINUS_INFINITY = float("-inf")


class Sequence:
    """One of the outputs of one request.

    Args:
        request: The request.
        index: Which of its outputs.
        max_tokens: Most tokens to write.
        eos_ids: End-of-sequence tokens.
        tokenizer: For text and stop strings; None for tokens alone.
        device: Where the logits will be.
    """

    def __init__(
        self,
        request: Request,
        index: int,
        *,
        max_tokens: int,
        eos_ids: frozenset[int],
        tokenizer: Any,
        device: torch.device,
    ) -> None:
        params = request.params
        self.request = request
        self.index = index
        self.token_ids: list[int] = []
        self.done = False
        self._output = CompletionOutput(index, "", self.token_ids)
        self._params = params
        self.max_tokens = max_tokens
        self._eos_ids = frozenset() if params.ignore_eos else eos_ids
        self._stop_ids = frozenset(params.stop_token_ids or ())
        self._text = _GrowingText(tokenizer, params.skip_special_tokens) if params.stops else None
        self._tokenizer = tokenizer
        self._generator: torch.Generator | None = None
        if params.seed is not None:
            # Each output of one request draws for itself, as in vLLM.
            self._generator = torch.Generator(device).manual_seed((params.seed + index) % (1 << 63))

    # -- the next token

    def choose(self, logits: torch.Tensor) -> int:
        """The next token.

        Args:
            logits: Float32, one a token of the vocabulary; changed in place.

        Raises:
            ModelError: If they are not numbers.
        """
        if not self.token_ids and bool(logits.isnan().any()):
            raise ModelError(
                "the model's output is not a number (NaN)",
                hint="its weights are damaged, or too large for its dtype; load with verify='finite', or as float32",
            )
        self._penalise(logits)
        if len(self.token_ids) < self._params.min_tokens:
            logits[[token for token in self._eos_ids | self._stop_ids if token < logits.numel()]] = _MINUS_INFINITY
        if self._params.is_greedy:
            return int(logits.argmax())
        logits = _restricted(logits / self._params.temperature, self._params)
        return int(torch.multinomial(logits.softmax(-1), 1, generator=self._generator))

    def _penalise(self, logits: torch.Tensor) -> None:
        params = self._params
        if params.repetition_penalty != 1.0:
            seen = torch.tensor(sorted({*self.request.token_ids, *self.token_ids}), device=logits.device)
            values = logits[seen]
            factor = params.repetition_penalty
            logits[seen] = torch.where(values > 0, values / factor, values * factor)
        if self.token_ids and (params.presence_penalty or params.frequency_penalty):
            written, counts = torch.unique(torch.tensor(self.token_ids, device=logits.device), return_counts=True)
            logits[written] -= params.presence_penalty + params.frequency_penalty * counts

    # -- the end

    def accept(self, token: int) -> None:
        """Take a token, and see whether the sequence ends with it."""
        self.token_ids.append(token)
        early = len(self.token_ids) <= self._params.min_tokens
        if self._text is not None:
            new_from = self._text.grow(self.token_ids)
            if not early and self._stopped_by_string(self._text, new_from):
                return
        # Below `min_tokens` these can't be drawn, so no count is needed here.
        if token in self._eos_ids:
            self._finish("stop", None)
        elif token in self._stop_ids:
            self._finish("stop", token)
        elif len(self.token_ids) >= self.max_tokens:
            self._finish("length", None)

    def _stopped_by_string(self, text: _GrowingText, new_from: int) -> bool:
        # A stop string may have begun before the newest piece of text, but not ended there.
        found = [
            (position, stop)
            for stop in self._params.stops
            if (position := text.value.find(stop, max(0, new_from - len(stop) + 1))) >= 0
        ]
        if not found:
            return False
        position, stop = min(found)
        self._finish("stop", stop)
        self._output.text = text.value[: position + len(stop) * self._params.include_stop_str_in_output]
        return True

    def _finish(self, reason: Any, stop: int | str | None) -> None:
        self.done = True
        self._output.finish_reason = reason
        self._output.stop_reason = stop

    def output(self) -> CompletionOutput:
        """What was written."""
        output = self._output
        if self._tokenizer is None or isinstance(output.stop_reason, str):
            return output
        # The token that ended the text is no part of it.
        hide_last = output.finish_reason == "stop" and not self._params.include_stop_str_in_output
        shown = self.token_ids[:-1] if hide_last else self.token_ids
        output.text = _decoded(self._tokenizer, shown, self._params.skip_special_tokens)
        return output


def _restricted(logits: torch.Tensor, params: Any) -> torch.Tensor:
    """The logits with those tokens at minus infinity that min_p, top_k and top_p rule out, in this order as in vLLM."""
    if params.min_p > 0:
        probabilities = logits.softmax(-1)
        logits = logits.masked_fill(probabilities < params.min_p * probabilities.max(), _MINUS_INFINITY)
    if 0 < params.top_k < logits.numel():
        logits = logits.masked_fill(logits < logits.topk(params.top_k).values[-1], _MINUS_INFINITY)
    if params.top_p < 1:
        ordered, order = logits.softmax(-1).sort(descending=True)
        # The token that crosses the threshold still belongs to the likeliest, so the sum before it is what counts.
        beyond = ordered.cumsum(-1) - ordered >= params.top_p
        logits = logits.masked_fill(torch.zeros_like(beyond).scatter(0, order, beyond), _MINUS_INFINITY)
    return logits


def _decoded(tokenizer: Any, token_ids: SequenceOf[int], skip_special_tokens: bool) -> str:
    return str(tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))


class _GrowingText:
    """The text of a growing list of tokens, each decoded with its neighbours only.

    A character may be spread over several tokens, and some tokenizers join words differently at the front, so a piece
    is decoded together with the one before it, and taken once it ends in a whole character.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        self.value = ""
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._before = 0
        self._taken = 0

    def grow(self, token_ids: SequenceOf[int]) -> int:
        """Take what is new; returns where the new text begins."""
        start = len(self.value)
        known = _decoded(self._tokenizer, token_ids[self._before : self._taken], self._skip)
        longer = _decoded(self._tokenizer, token_ids[self._before :], self._skip)
        if len(longer) > len(known) and not longer.endswith("\ufffd"):
            self.value += longer[len(known) :]
            self._before, self._taken = self._taken, len(token_ids)
        return start


class Sampler(LogitsProcessor):  # type: ignore[misc]
    """Leaves each row only the token that its sequence chose, so that a greedy `generate` takes it."""

    def __init__(self, sequences: SequenceOf[Sequence]) -> None:
        self._sequences = sequences

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 -- theirs
        """One row a sequence."""
        for sequence, row in zip(self._sequences, scores, strict=True):
            if not sequence.done:
                token = sequence.choose(row)
                row.fill_(_MINUS_INFINITY)
                row[token] = 0.0
        return scores


class Ending(StoppingCriteria):  # type: ignore[misc]
    """Hands each sequence its newest token, and says which have ended."""

    def __init__(self, sequences: SequenceOf[Sequence]) -> None:
        self._sequences = sequences

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ARG002 -- theirs
        """One row a sequence."""
        for sequence, token in zip(self._sequences, input_ids[:, -1].tolist(), strict=True):
            if not sequence.done:
                sequence.accept(token)
        return torch.tensor([sequence.done for sequence in self._sequences], device=input_ids.device)
