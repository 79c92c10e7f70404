"""The engine that writes text with transformers' own `generate`."""

from __future__ import annotations

import inspect
import itertools
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm
from transformers import AutoTokenizer, GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from weightloaders import api, loading
from weightloaders.dispatch import input_device
from weightloaders.errors import ConfigError, ModelError, SourceReadError, WeightLoadersError, summary
from weightloaders.llm.engines.sequences import Ending, Sampler, Sequence
from weightloaders.llm.outputs import Request, RequestOutput, SamplingParams
from weightloaders.prepare import check_companions, load_context, prepare
from weightloaders.skeleton import model_files
from weightloaders.weights.discretion import shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from collections.abc import Sequence as SequenceOf

    from weightloaders.loaders.base import BaseWeightLoader
    from weightloaders.loading import LoadContext
    from weightloaders.report import LoadReport
    from weightloaders.weights.candidates import Listing

logger = logging.getLogger(__name__)

# A folder with a tokenizer has at least one of these.
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip
# What tokenizers of transformers read, whatever they are called.
_READ_BY_TOKENIZERS = (
    "config.json", "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "*.model", "*.tiktoken", "*.jinja",
)  # fmt: skip
# What a generation config may say about sampling, in transformers' and in vLLM's words; vLLM takes the same.
_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


class TransformersEngine:
    """A transformers model that writes text.

    Args:
        model: The model, filled.
        tokenizer: Its tokenizer; None where there is none.
        max_num_seqs: How many sequences are written at once.
        max_model_len: Longest prompt plus output, in tokens. Default: what the model's config says.

    Attributes:
        model: See above.
        tokenizer: See above.
        load_report: What the last load did; None where the model was filled by somebody else.
        default_params: How to write where nothing is said, as the model's generation config has it.
    """

    def __init__(
        self, model: Any, tokenizer: Any = None, *, max_num_seqs: int = 32, max_model_len: int | None = None
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.load_report: LoadReport | None = None
        self.default_params = _default_params(getattr(model, "generation_config", None))
        self._max_num_seqs = max_num_seqs
        self._max_model_len = _max_model_len(model.config, max_model_len)

    @classmethod
    def load(
        cls,
        model: str,
        *,
        load_options: Mapping[str, Any],
        weights: Any = None,
        tokenizer: str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        max_num_seqs: int = 32,
        max_model_len: int | None = None,
        **model_kwargs: Any,
    ) -> TransformersEngine:
        """Build the model, fill it, and read its tokenizer. See `LLM` for the arguments.

        Raises:
            WeightLoadersError: As `from_pretrained` does.
            ModelError: If there is a tokenizer that can't be read.
        """
        if revision is not None and weights is not None:
            # It is one of the model's repository, which `weights` leads away from.
            model_kwargs["revision"] = revision
        context = load_context(**load_options)
        prepared = prepare(
            model,
            context,
            weights=weights,
            trust_remote_code=trust_remote_code,
            **model_kwargs,
        )
        # Before the weights, as it is quick: who mistyped its name need not wait for them.
        if tokenizer is not None:
            read_tokenizer = _tokenizer(tokenizer, {}, trust_remote_code, context)
        else:
            loader = prepared.loader if weights is None else None
            # What a loader hands out is a folder, whatever was named.
            found = None if loader is None else loader.get_model_files(model)
            has_one = _has_tokenizer(model if found is None else found)
            read_tokenizer = (
                _tokenizer(model, prepared.hub_options, trust_remote_code, context, loader) if has_one else None
            )
        engine = cls(prepared.model, read_tokenizer, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        engine.load_report = prepared.fill()
        return engine

    def reload_weights(self, source: Any, **load_options: Any) -> LoadReport:
        """Fill the same model again, in place. See `load_into` for the options."""
        self.load_report = api.load_into(self.model, source, **load_options)
        return self.load_report

    def generate(self, requests: SequenceOf[Request], *, show_progress: bool = False) -> list[RequestOutput]:
        """Write text for each request. See `Engine.generate`."""
        with loading.usable(self.model):
            return self._generate(requests, show_progress)

    def _generate(self, requests: SequenceOf[Request], show_progress: bool) -> list[RequestOutput]:
        if not (hasattr(self.model, "can_generate") and self.model.can_generate()):
            raise ModelError(
                f"a {type(self.model).__name__} does not write text",
                hint="use `llm.model` itself for embeddings, or a model with a language modelling head for text",
            )
        sequences = [self._sequence(request, i) for request in requests for i in range(request.params.n)]
        with tqdm(total=len(sequences), unit="seq", disable=None if show_progress else True) as progress:
            for batch in self._batches(sequences):
                self._write(batch)
                progress.update(len(batch))
        outputs = iter(sequences)
        return [
            RequestOutput(
                request.request_id,
                request.prompt,
                list(request.token_ids),
                [sequence.output() for sequence in itertools.islice(outputs, request.params.n)],
            )
            for request in requests
        ]

    def _sequence(self, request: Request, index: int) -> Sequence:
        where = f"the prompt of request {request.request_id}"
        length, vocabulary = len(request.token_ids), self._vocabulary()
        if not all(0 <= token < vocabulary for token in request.token_ids):
            raise ModelError(f"{where} has a token outside the vocabulary of {vocabulary}")
        limits = [] if request.params.max_tokens is None else [request.params.max_tokens]
        if self._max_model_len is not None:
            # What an encoder reads takes no room from what the decoder writes.
            used = 1 if self.model.config.is_encoder_decoder else length
            limits.append(self._max_model_len - used)
            if max(length, used + 1) > self._max_model_len:
                raise ModelError(
                    f"{where} has {length} tokens, and the model has room for {self._max_model_len}, output included",
                    hint="shorten the prompt",
                )
        if not limits:
            raise ModelError("this model has no longest length of its own", hint="give max_tokens or max_model_len")
        if request.params.stops and self.tokenizer is None:
            raise ConfigError("`stop` needs a tokenizer, which this model has not", hint="use stop_token_ids")
        return Sequence(
            request,
            index,
            max_tokens=min(limits),
            eos_ids=self._eos_ids(),
            tokenizer=self.tokenizer,
            device=input_device(self.model),
        )

    def _eos_ids(self) -> frozenset[int]:
        found = getattr(self.model.generation_config, "eos_token_id", None)
        listed = found if isinstance(found, list) else [found]
        return frozenset(int(i) for i in (*listed, getattr(self.tokenizer, "eos_token_id", None)) if i is not None)

    def _batches(self, sequences: SequenceOf[Sequence]) -> Iterator[list[Sequence]]:
        """Sequences of about one length, so that little is padding; of exactly one where the model can't be padded."""

        def length(sequence: Sequence) -> int:
            return len(sequence.request.token_ids)

        # A recurrent state takes in the padding too, whatever the mask says.
        paddable = self._takes_mask() and not getattr(self.model, "_is_stateful", False)
        ordered = sorted(sequences, key=length)
        groups = [ordered] if paddable else [list(group) for _, group in itertools.groupby(ordered, length)]
        for group in groups:
            for start in range(0, len(group), self._max_num_seqs):
                yield group[start : start + self._max_num_seqs]

    def _takes_mask(self) -> bool:
        return "attention_mask" in inspect.signature(self.model.forward).parameters

    def _write(self, batch: SequenceOf[Sequence]) -> None:
        pad = self._pad_id()
        prompts = [torch.tensor(sequence.request.token_ids) for sequence in batch]
        # What is written follows the prompt, so the padding goes in front; an encoder counts from the front.
        side = "right" if self.model.config.is_encoder_decoder else "left"
        ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_value=pad, padding_side=side)
        mask = torch.nn.utils.rnn.pad_sequence(
            [torch.ones_like(prompt) for prompt in prompts], batch_first=True, padding_side=side
        )
        inputs = {"input_ids": ids.to(input_device(self.model))}
        if self._takes_mask():
            inputs["attention_mask"] = mask.to(input_device(self.model))
        self.model.generate(
            **inputs,
            # Everything that the model's own generation config might add is switched off: sequences decide themselves.
            # (What is None here would be taken from there; an empty list of end tokens ends nothing.)
            generation_config=GenerationConfig(
                max_new_tokens=max(sequence.max_tokens for sequence in batch),
                do_sample=False,
                num_beams=1,
                num_return_sequences=1,
                repetition_penalty=1.0,
                no_repeat_ngram_size=0,
                min_length=0,
                eos_token_id=[],
                pad_token_id=pad,
            ),
            logits_processor=LogitsProcessorList([Sampler(batch)]),
            stopping_criteria=StoppingCriteriaList([Ending(batch)]),
        )

    def _pad_id(self) -> int:
        # Padding is masked, so any token will do; but some models count positions by looking for theirs. One that lies
        # outside the vocabulary was added to the tokenizer alone.
        vocabulary = self._vocabulary()
        for holder in (self.model.config.get_text_config(), self.model.generation_config, self.tokenizer):
            pad = getattr(holder, "pad_token_id", None)
            if isinstance(pad, int) and 0 <= pad < vocabulary:
                return pad
        return 0

    def _vocabulary(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)


def _has_tokenizer(source: str | Path | Listing) -> bool:
    """Whether there may be one: a folder has its files, or has not; a repository must be asked."""
    if isinstance(source, str | Path):
        folder = Path(source)
        may = not folder.is_dir() or any((folder / name).is_file() for name in _TOKENIZER_FILES)
    else:
        may = len(source.problems(_TOKENIZER_FILES)) < len(_TOKENIZER_FILES)
    if not may:
        logger.info("%s has no tokenizer, so prompts are token ids", getattr(source, "where", source))
    return may


def _tokenizer(
    source: str,
    hub: Mapping[str, Any],
    trust_remote_code: bool,
    context: LoadContext,
    loader: BaseWeightLoader | None = None,
) -> Any:
    # transformers raises whatever its many tokenizers raise.
    try:
        folder = model_files(source, hub, loader=loader)
        check_companions(folder, (*_READ_BY_TOKENIZERS, "*.py") if trust_remote_code else _READ_BY_TOKENIZERS, context)
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except SourceReadError:
        raise
    except Exception as error:
        raise ModelError(
            f"the tokenizer in {shown(source)} can't be read: "
            f"{error.message if isinstance(error, WeightLoadersError) else summary(error)}",
            file=shown(source),
            hint="name another: LLM(..., tokenizer='folder or hub id')",
        ) from error


def _max_model_len(config: Any, wanted: int | None) -> int | None:
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if wanted is None or limit is None:
        return wanted if limit is None else int(limit)
    if wanted > limit:
        raise ConfigError(f"max_model_len is {wanted}, but the model has positions for {limit} tokens only")
    return wanted


def _default_params(generation_config: Any) -> SamplingParams:
    if generation_config is None:
        return SamplingParams()
    said = {_DEFAULTS[name]: value for name, value in generation_config.to_diff_dict().items() if name in _DEFAULTS}
    said = {name: value for name, value in said.items() if value is not None}
    try:
        return SamplingParams(**said)
    except ConfigError as error:
        logger.warning("the model's generation config is not used for defaults: %s", error.message)
        return SamplingParams()
