"""`SamplingParams` and `RequestOutput`, with vLLM's names and meanings.

Source: vLLM's ``SamplingParams``, ``RequestOutput`` and ``CompletionOutput``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from weightloaders.errors import ConfigError
from weightloaders.validation import Checked

# Known to vLLM, not honoured here. Ignoring one would give other text than was asked for, so each is refused by name.
_NOT_SUPPORTED = frozenset(
    {
        "allowed_token_ids", "bad_words", "best_of", "detokenize", "extra_args", "flat_logprobs", "guided_decoding",
        "logit_bias", "logits_processors", "logprobs", "output_kind", "prompt_logprobs", "structured_outputs",
        "spaces_between_special_tokens", "truncate_prompt_tokens",
    }
)  # fmt: skip
# Below this a temperature means greedy, as in vLLM.
_GREEDY = 1e-5

_Number = Annotated[float, Field(allow_inf_nan=False)]


class SamplingParams(Checked):
    """How text is written: vLLM's names, defaults and meanings.

    Attributes:
        n: How many outputs for each prompt.
        temperature: 0 is greedy: always the likeliest token.
        top_p: Only the likeliest tokens that together have this probability are drawn from. 1 for all.
        top_k: Only so many of the likeliest tokens are drawn from. 0 or -1 for all.
        min_p: Only tokens with at least this share of the likeliest token's probability are drawn from.
        max_tokens: Most tokens to write; None for as many as the model has room for.
        min_tokens: No end and no stop before so many tokens.
        stop: A string, or several, at which the text ends.
        stop_token_ids: Tokens at which the text ends.
        seed: For the same draws each time, whatever else is in the batch. None draws from torch's default generator.
        repetition_penalty: Above 1 makes tokens that occur in the prompt or the output less likely.
        presence_penalty: Subtracted once from the logit of each token that is in the output.
        frequency_penalty: Subtracted from a token's logit for each time that it is in the output.
        ignore_eos: Go on behind the end-of-sequence token.
        skip_special_tokens: Leave special tokens out of the text.
        include_stop_str_in_output: Leave the stop string or token in the text.

    Raises:
        ConfigError: If a value is not allowed, or a name is unknown or not supported.
    """

    n: Annotated[int, Field(ge=1)] = 1
    temperature: Annotated[_Number, Field(ge=0)] = 1.0
    top_p: Annotated[_Number, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: Annotated[_Number, Field(ge=0, le=1)] = 0.0
    max_tokens: Annotated[int, Field(ge=1)] | None = 16
    min_tokens: Annotated[int, Field(ge=0)] = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None
    repetition_penalty: Annotated[_Number, Field(gt=0)] = 1.0
    presence_penalty: Annotated[_Number, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[_Number, Field(ge=-2, le=2)] = 0.0
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    @model_validator(mode="before")
    @classmethod
    def _only_supported(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for name in sorted(_NOT_SUPPORTED & values.keys()):
            # None is vLLM's default for most of them, and means that it was not asked for.
            if values[name] is not None:
                raise ConfigError(f"SamplingParams: {name!r} is one of vLLM's, but is not supported here")
        return {name: value for name, value in values.items() if name not in _NOT_SUPPORTED}

    @model_validator(mode="after")
    def _fit_together(self) -> SamplingParams:
        if any(not stop for stop in self.stops):
            raise ValueError("a stop string can't be empty")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) is more than max_tokens ({self.max_tokens})")
        if self.is_greedy and self.n > 1:
            raise ValueError(f"n is {self.n}, but temperature 0 would write the same {self.n} times")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < _GREEDY


@dataclass(slots=True)
class CompletionOutput:
    """One text that was written for a prompt.

    Attributes:
        index: Which of the prompt's ``n`` outputs it is.
        text: What was written.
        token_ids: The same as tokens, the stop token included.
        cumulative_logprob: Always None; log-probabilities are not supported.
        logprobs: Always None.
        finish_reason: ``"stop"`` (an end-of-sequence token, a stop string or stop token) or ``"length"``.
        stop_reason: The stop string or stop token; None for an end-of-sequence token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether it came to an end."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """What came of one prompt.

    Attributes:
        request_id: Number of the request within its `LLM`, as text.
        prompt: The prompt, or None where it was given as tokens.
        prompt_token_ids: The prompt's tokens, as the model got them.
        outputs: The texts that were written, ``n`` of them.
        finished: Whether all came to an end.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = True


if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt on its way to an engine.

    Attributes:
        request_id: See `RequestOutput`.
        prompt: The prompt's text, where there is one.
        token_ids: Its tokens.
        params: How to write.
    """

    request_id: str
    prompt: str | None
    token_ids: Sequence[int]
    params: SamplingParams
