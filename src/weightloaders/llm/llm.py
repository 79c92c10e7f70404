"""`LLM`: a model, filled by any loader, that writes text. The names and shapes are vLLM's."""

from __future__ import annotations

import difflib
import inspect
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightloaders.config import LLMConfig
from weightloaders.errors import ConfigError, OptionsError, RegistryError
from weightloaders.llm.engines.base import engine_class
from weightloaders.llm.outputs import RequestOutput, SamplingParams
from weightloaders.llm.prompts import rendered, requests_for
from weightloaders.loaders.place import as_name
from weightloaders.validation import unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from weightloaders.loaders.base import BaseWeightLoader
    from weightloaders.report import LoadReport
    from weightloaders.transfer.device_map import DeviceOption
    from weightloaders.transfer.options import TransferOption
    from weightloaders.transfer.verify import VerifyOption

# Near enough to one of our own parameters to be a slip rather than an argument for the model.
_SLIP = 0.8
_ELSEWHERE = {"loader": "weight_loader", "loader_kwargs": "weight_loader_kwargs", "source": "model"}


class LLM:
    """A language model and its tokenizer.

    ::

        llm = LLM(model="path/to/model", weight_loader="my_custom", weight_loader_kwargs={"file_pattern": "*.bin"})
        print(llm.generate("Hello", SamplingParams(max_tokens=16))[0].outputs[0].text)

    Args:
        model: Folder or hub id with the model's config.
        weights: Where the weights lie, if not with the config; or weights themselves, as `load_into` takes them.
        weight_loader: A loader: its name, class, an instance, or ``"package.module:Class"``.
        weight_loader_kwargs: The loader's options.
        rules: Renames, drops and conversions of names and layouts.
        dtype: ``"auto"`` (the config's), a torch dtype or its name.
        device: Where the model goes.
        device_map: The same for a model over several devices; see `from_pretrained`.
        engine: What writes the text.
        tokenizer: Folder or hub id of the tokenizer, if not with the config.
        revision: Commit, tag or branch of ``model`` on the hub.
        trust_remote_code: Whether code that lies with the model may run.
        on_missing: What to do about parameters that the source has nothing for: ``"error"``, ``"warn"``, ``"ignore"``,
            or a dict of name pattern to one of these.
        on_unexpected: The same for tensors that the model has no place for.
        on_mismatch: The same for tensors of another shape.
        progress: None for a bar on a terminal and a few log lines elsewhere, False for silence, or a function that is
            called with each `ProgressEvent`.
        verify: Additional checks, one or several: ``"sha256"``, ``"finite"``, ``"record"``; see `load_into`. The config
            and the tokenizer are held against their checksums, too, before they are used.
        automatic: Whether names may be matched without being asked, by wrappers and well-known prefixes.
        transfer: How bytes are moved: the name of a mode, or `TransferOptions`; see `load_into`. Default: the engine's
            own, which is ``"direct"`` for ``"transformers"`` and ``"mmap"`` for ``"vllm"``.
        max_num_seqs: How many sequences are written at once.
        max_model_len: Longest prompt plus output, in tokens. Default: what the model's config says.
        sampling_params: Used where `generate` is given none. Default: what the model's generation config says.
        model_kwargs: Further arguments for the model's constructor, and ``quantization_config``; see `from_pretrained`.

    Raises:
        WeightLoadersError: If anything does not fit; see `from_pretrained`.
        ConfigError: If an argument is unknown or not allowed.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        weights: Any = None,
        weight_loader: str | type[BaseWeightLoader] | BaseWeightLoader = "auto",
        weight_loader_kwargs: Mapping[str, Any] | None = None,
        rules: Any = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "cpu",
        device_map: DeviceOption = None,
        engine: str = "transformers",
        tokenizer: str | Path | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        on_missing: str | Mapping[str, str] = "error",
        on_unexpected: str | Mapping[str, str] = "warn",
        on_mismatch: str | Mapping[str, str] = "error",
        progress: bool | Callable[[Any], object] | None = None,
        verify: VerifyOption | None = None,
        automatic: bool = True,
        transfer: TransferOption | None = None,
        max_num_seqs: int = 32,
        max_model_len: int | None = None,
        sampling_params: SamplingParams | None = None,
        **model_kwargs: Any,
    ) -> None:
        _refuse_slips(model_kwargs)
        for name, place in (("model", model), ("tokenizer", model if tokenizer is None else tokenizer)):
            _check(name, place, str | Path, "a folder or hub id")
        _check("weight_loader_kwargs", weight_loader_kwargs, Mapping | None, "a mapping of names to values")
        # What is used late, or as a truth value, would be wrong for long before anybody hears of it.
        _check("sampling_params", sampling_params, SamplingParams | None, "a SamplingParams")
        _check("trust_remote_code", trust_remote_code, bool, "True or False")
        _check_count("max_num_seqs", max_num_seqs)
        if max_model_len is not None:
            _check_count("max_model_len", max_model_len)
        options = dict(weight_loader_kwargs or {})
        if revision is not None and weights is None:
            options = {"revision": revision, **options}
        self._source = model if weights is None else weights
        self._loader: dict[str, Any] = {"loader": weight_loader, "loader_kwargs": options}
        self._load_options = {
            "rules": rules,
            "on_missing": on_missing,
            "on_unexpected": on_unexpected,
            "on_mismatch": on_mismatch,
            "progress": progress,
            "verify": verify,
            "automatic": automatic,
            "transfer": transfer,
        }
        self._engine = engine_class(engine).load(
            as_name(model),
            weights=weights,
            tokenizer=None if tokenizer is None else as_name(tokenizer),
            revision=revision,
            trust_remote_code=trust_remote_code,
            dtype=dtype,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            load_options={**_passed_on(self._load_options), "device": device, "device_map": device_map},
            **self._loader,
            **model_kwargs,
        )
        self._default_params = sampling_params or self._engine.default_params
        self._request_ids = map(str, itertools.count())

    @classmethod
    def from_config(cls, path: str | Path, **overrides: Any) -> LLM:
        """Make an LLM as a config file says.

        Args:
            path: A ``.yaml``, ``.toml`` or ``.json`` file; see `LLMConfig` for its keys.
            overrides: Arguments that count instead of the file's.

        Raises:
            ConfigError: If the file has an unknown key, or a value that is not allowed.
            WeightLoadersError: As the constructor does.
        """
        _check("path", path, str | Path, "the path of a config file")
        arguments = LLMConfig.from_file(path).arguments()
        if arguments["sampling_params"] is not None:
            try:
                arguments["sampling_params"] = SamplingParams(**arguments["sampling_params"])
            except ConfigError as error:
                raise ConfigError(f"{path}: sampling_params: {error.message}", file=path) from None
        try:
            return cls(**{**arguments, **overrides})
        except (RegistryError, OptionsError) as error:
            if not overrides.keys() & {"weight_loader", "weight_loader_kwargs"}:
                error.file = error.file or str(path)
            raise

    @property
    def model(self) -> torch.nn.Module:
        """The model itself."""
        return self._engine.model

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer; None where there is none."""
        return self._engine.tokenizer

    @property
    def load_report(self) -> LoadReport | None:
        """What the last load did."""
        return self._engine.load_report

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses where it is given none."""
        return self._default_params

    def generate(
        self,
        prompts: str | Sequence[int] | Mapping[str, Any] | Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Go on from one or several prompts.

        Args:
            prompts: A prompt or a list of them; each a string, a list of token ids, ``{"prompt": ...}`` or
                ``{"prompt_token_ids": [...]}``.
            sampling_params: For all of them, or one for each.
            use_tqdm: Show a progress bar, if standard error is a terminal.

        Returns:
            One `RequestOutput` a prompt, in their order.

        Raises:
            ConfigError: If a prompt or the parameters are not what they should be.
            ModelError: If the model can't write text, or has no room for a prompt; or from within a load into it.
            HalfLoadedModelError: If the last reload failed on the way.
        """
        return self._written(prompts, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one or several conversations, through the tokenizer's chat template.

        Args:
            messages: A list of ``{"role": ..., "content": ...}``, or a list of such lists.
            sampling_params: For all of them, or one for each.
            use_tqdm: Show a progress bar, if standard error is a terminal.
            chat_template: Used instead of the tokenizer's own.
            add_generation_prompt: End with what makes the model answer.
            continue_final_message: Let the model go on with the last message instead.
            tools: Descriptions of functions, for templates that take them.
            chat_template_kwargs: Further values for the template.

        Returns:
            One `RequestOutput` a conversation; its ``prompt`` is the conversation as the template has it.

        Raises:
            ConfigError: If there is no template, or the messages do not fit it.
            ModelError: See `generate`.
            HalfLoadedModelError: See `generate`.
        """
        prompts = rendered(
            messages,
            self.tokenizer,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **(chat_template_kwargs or {}),
        )
        # The template has written the special tokens out.
        return self._written(prompts, sampling_params, use_tqdm, add_special_tokens=False)

    def _written(
        self, prompts: Any, params: Any, use_tqdm: bool, *, add_special_tokens: bool = True
    ) -> list[RequestOutput]:
        requests = requests_for(
            prompts,
            self._default_params if params is None else params,
            tokenizer=self.tokenizer,
            request_ids=self._request_ids,
            add_special_tokens=add_special_tokens,
        )
        return self._engine.generate(requests, show_progress=use_tqdm)

    def reload_weights(
        self,
        source: Any = None,
        *,
        weight_loader: str | type[BaseWeightLoader] | BaseWeightLoader | None = None,
        weight_loader_kwargs: Mapping[str, Any] | None = None,
        atomic: bool = False,
        **load_options: Any,
    ) -> LoadReport:
        """Fill the same model again, in place: whoever holds the model or a parameter sees the new values.

        That all fits, and that the files are those that were looked at, is known before anything is written; if
        something is wrong there, the model is as it was. If it fails on the way, the model is marked, and `generate`
        refuses it until a reload succeeds. Before anything is written, what other threads generate ends; what they ask
        for meanwhile waits for the new weights.

        Args:
            source: Where the new weights lie; or weights themselves, as `load_into` takes them. Default: where the last
                ones came from.
            weight_loader: The loader. Default: the last one, with its options.
            weight_loader_kwargs: The loader's options.
            atomic: Whether the model is to keep its old weights until all the new ones are there, also if it fails on
                the way. That takes the weights' memory once more.
            load_options: Those of ``rules``, ``on_missing``, ``on_unexpected``, ``on_mismatch``, ``progress``,
                ``verify``, ``automatic`` and ``transfer`` that shall differ from what this LLM was made with.

        Returns:
            What was loaded; also in `load_report`.

        Raises:
            ConfigError: If an option is unknown, or there is no source.
            ModelError: If it is called from within `generate`.
            WeightLoadersError: As `load_into` does.
        """
        odd = sorted(load_options.keys() - self._load_options.keys())
        if odd:
            raise ConfigError(f"reload_weights: {unknown(odd[0], self._load_options)}")
        options = _passed_on({**self._load_options, **load_options, **({"atomic": True} if atomic else {})})
        if source is not None and not isinstance(source, str | Path):
            return self._engine.reload_weights(source, **options)
        if source is None:
            source = self._source
            if not isinstance(source, str | Path):
                raise ConfigError("the weights were given as such, so there is no place to read them from again")
        loader = dict(self._loader)
        if weight_loader is not None:
            loader = {"loader": weight_loader, "loader_kwargs": {}}
        elif source != self._source:
            # A commit of one repository is none of another.
            kept = {name: value for name, value in loader["loader_kwargs"].items() if name != "revision"}
            loader["loader_kwargs"] = kept
        if weight_loader_kwargs is not None:
            loader["loader_kwargs"] = dict(weight_loader_kwargs)
        report = self._engine.reload_weights(source, **loader, **options)
        self._source, self._loader = source, loader
        return report


def _passed_on(options: Mapping[str, Any]) -> dict[str, Any]:
    """Without ``transfer`` where nothing was said: each engine has a default of its own."""
    return {name: value for name, value in options.items() if name != "transfer" or value is not None}


def _check(name: str, value: object, kind: Any, said: str) -> None:
    if not isinstance(value, kind):
        raise ConfigError(f"{name} is {said}, not {value!r}")


def _check_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} is a number from 1 on, not {value!r}")


def _refuse_slips(model_kwargs: Mapping[str, Any]) -> None:
    own = inspect.signature(LLM).parameters.keys() - {"model_kwargs"}
    if "model_kwargs" in model_kwargs:
        raise ConfigError(
            "model_kwargs is a key of config files: here what is in it is given as it is, each by its name"
        )
    for name in model_kwargs:
        # What `from_pretrained` calls so.
        close = [_ELSEWHERE[name]] if name in _ELSEWHERE else difflib.get_close_matches(name, sorted(own), 1, _SLIP)
        if close:
            raise ConfigError(f"LLM has no argument {name!r}; did you mean {close[0]!r}?")
