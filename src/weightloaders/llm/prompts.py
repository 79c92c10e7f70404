"""From what a caller hands to `generate` or `chat` to requests: lists of tokens, each with its parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weightloaders.errors import ConfigError
from weightloaders.llm.outputs import Request, SamplingParams

_FORMS = "a prompt is a string, a list of token ids, {'prompt': ...} or {'prompt_token_ids': [...]}"


def requests_for(
    prompts: Any,
    params: SamplingParams | Sequence[SamplingParams],
    *,
    tokenizer: Any,
    request_ids: Iterator[str],
    add_special_tokens: bool = True,
) -> list[Request]:
    """One request a prompt.

    Args:
        prompts: One prompt or a list of them.
        params: For all of them, or one for each.
        tokenizer: For prompts that are text; None where there is none.
        request_ids: Where the requests' ids come from.
        add_special_tokens: Whether the tokenizer adds its own around a text.

    Raises:
        ConfigError: If a prompt or the parameters are not what they should be.
    """
    single = isinstance(prompts, str | Mapping) or _is_tokens(prompts)
    if not single and not isinstance(prompts, Sequence):
        raise ConfigError(f"generate takes a prompt or a list of prompts, not a {type(prompts).__name__}", hint=_FORMS)
    listed = [prompts] if single else list(prompts)
    return [
        Request(next(request_ids), *_understood(prompt, i, tokenizer, add_special_tokens), param)
        for i, (prompt, param) in enumerate(zip(listed, _one_each(params, len(listed)), strict=True))
    ]


def _is_tokens(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and len(value) > 0
        and all(isinstance(token, int) and not isinstance(token, bool) for token in value)
    )


def _one_each(params: Any, count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(item, SamplingParams) for item in params):
        raise ConfigError(f"sampling_params is a SamplingParams or a list of them, not {params!r}")
    if len(params) != count:
        raise ConfigError(f"there are {count} prompts, but {len(params)} sampling_params")
    return list(params)


def _understood(prompt: Any, index: int, tokenizer: Any, add_special_tokens: bool) -> tuple[str | None, list[int]]:
    """A prompt's text, where it has one, and its tokens."""
    text: Any = prompt
    tokens: Any = prompt
    if isinstance(prompt, Mapping):
        odd = prompt.keys() - {"prompt", "prompt_token_ids"}
        if odd:
            raise ConfigError(f"prompt {index} has the unknown key {min(map(repr, odd))}", hint=_FORMS)
        text, tokens = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if _is_tokens(tokens):
        return (text if isinstance(text, str) else None), list(tokens)
    if isinstance(text, str):
        return text, _tokenized(text, index, tokenizer, add_special_tokens)
    what = "empty" if isinstance(tokens, Sequence) and not tokens else "no prompt"
    raise ConfigError(f"prompt {index} is {what}: {prompt!r:.200}", hint=_FORMS)


def _tokenized(text: str, index: int, tokenizer: Any, add_special_tokens: bool) -> list[int]:
    if tokenizer is None:
        raise ConfigError(
            f"prompt {index} is text, but this model has no tokenizer",
            hint="name one: LLM(..., tokenizer='folder or hub id'); or give {'prompt_token_ids': [...]}",
        )
    token_ids = [int(token) for token in tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]]
    if not token_ids:
        raise ConfigError(f"prompt {index} is empty: {text!r} has no tokens", hint="give something to go on from")
    return token_ids


def rendered(conversations: Any, tokenizer: Any, **template_options: Any) -> list[str]:
    """Conversations as text, by a tokenizer's chat template.

    Args:
        conversations: A list of messages (``{"role": ..., "content": ...}``), or a list of such lists.
        tokenizer: The tokenizer; None where there is none.
        template_options: For its ``apply_chat_template``; a ``chat_template`` of None means the tokenizer's own.

    Raises:
        ConfigError: If there is no template, or the messages do not fit it.
    """
    if tokenizer is None:
        raise ConfigError(
            "this model has no tokenizer, so it can't chat", hint="name one: LLM(..., tokenizer='folder or hub id')"
        )
    if template_options.get("chat_template") is None and not tokenizer.chat_template:
        raise ConfigError(
            "the tokenizer has no chat template, so it can't chat",
            hint="use `generate` with a prompt, or give chat(..., chat_template='...')",
        )
    if not isinstance(conversations, Sequence) or isinstance(conversations, str):
        raise ConfigError(f"chat takes a list of messages, not a {type(conversations).__name__}")
    several = conversations and not isinstance(conversations[0], Mapping)
    return [
        _rendered(messages, tokenizer, template_options) for messages in (conversations if several else [conversations])
    ]


def _rendered(messages: Any, tokenizer: Any, options: dict[str, Any]) -> str:
    if (
        not isinstance(messages, Sequence)
        or not messages
        or not all(isinstance(m, Mapping) and "role" in m for m in messages)
    ):
        raise ConfigError(f"a conversation is a list of {{'role': ..., 'content': ...}}, not {messages!r:.200}")
    # A template is a program that came with the model; whatever it raises is about these messages.
    try:
        return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
    except Exception as error:
        raise ConfigError(f"the chat template refuses these messages: {error}") from error
