"""`RequestEngine`: requests one by one, from several threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cppbatch.chat.chat_format import ChatFormat
from cppbatch.config import EngineConfig
from cppbatch.engine.access import EngineAccess, Result
from cppbatch.engine.chats import ChatFormats
from cppbatch.engine.core import EngineCore
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.observe.live_state import LiveEngine
from cppbatch.engine.observe.metrics import EngineStats
from cppbatch.engine.params import Params, sampling_params
from cppbatch.engine.request import (
    GenerationEvent,
    GenerationRequest,
    MediaPrompt,
    Prompt,
    RequestOptions,
    ResumeState,
    Task,
    TokenPiece,
)
from cppbatch.engine.runtime import Runtime
from cppbatch.engine.scheduler import Scheduler
from cppbatch.engine.sequence import Seq
from cppbatch.engine.step_plan import StepPlan
from cppbatch.engine_settings import EngineSettings, engine_config
from cppbatch.llama import apply_builtin_template
from cppbatch.unclosed import close_at_exit, warn_unclosed

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class RequestEngine:
    """An engine for single requests. `BatchInferenceEngine` adds calls for whole lists of prompts."""

    def __init__(
        self,
        model: str | Path | EngineConfig,
        *,
        progress: Callable[[float], bool] | None = None,
        runtime: Runtime | None = None,
        policy: Callable[..., Scheduler] | None = None,
        on_plan: Callable[[StepPlan], object] | None = None,
        survives_failures: bool = True,
        **settings: Unpack[EngineSettings],
    ) -> None:
        """Loads a GGUF file.

        `settings`: fields of `EngineConfig` (n_ctx, n_parallel, n_gpu_layers ...). `progress`: called with 0.0 to 1.0
        while loading; returning False aborts. `runtime`: a replacement for the model (tests). `policy`: another
        scheduler (benchmarks). `on_plan`, `survives_failures`: for the `EngineCore` (tests, benchmarks). Raises
        `ModelError`, `ConfigError`, `LibraryError`, `LlamaError`.
        """
        self.config = engine_config(model, settings)
        self.core = EngineCore(
            self.config,
            progress=progress,
            runtime=runtime,
            policy=policy,
            on_plan=on_plan,
            survives_failures=survives_failures,
        )
        """The step loop. Changes to it require access (`EngineAccess`)."""
        close_at_exit(self)
        self.access = EngineAccess(self.core.process)
        self._chat_formats = ChatFormats(self.info, apply_builtin_template)
        self._numbers = itertools.count(1)

    # --- requests -----------------------------------------------------------------------------------------------

    @property
    def info(self) -> ModelInfo:
        """The loaded model."""
        return self.core.runtime.info

    def prepare(self, request: GenerationRequest, resume: ResumeState | None = None) -> Seq:
        """See `EngineCore.make_sequence`."""
        self.core.process.check()
        return self.core.make_sequence(request, resume)

    def tokens(
        self, text: str | list[int] | MediaPrompt, *, add_special: bool = True, parse_special: bool = True
    ) -> list[TokenPiece]:
        """The tokens of a prompt, or the pieces of token ids. Any thread may call this, until the engine is closed.

        `add_special`: start with BOS if the model uses it. `parse_special`: the text may contain control tokens. Both
        always apply to a `MediaPrompt`, except for its `PlainText`; the tokens of its images and audio have no bytes.
        Raises `InvalidRequest` for unknown ids.
        """
        return self.core.inputs.tokens(text, add_special=add_special, parse_special=parse_special)

    def new_request_id(self) -> str:
        """An unused request id: "request-1", "request-2" ..."""
        return next(new for n in self._numbers if (new := f"request-{n}") not in self.core.sequences)

    def add(self, sequence: Seq) -> None:
        """Queues a prepared sequence. Raises `InvalidRequest` if its id is in use, `QueueFull`, `EngineClosed`."""
        self._change(lambda: self.core.add(sequence))

    def add_request(
        self,
        prompt: Prompt,
        params: Params = None,
        *,
        request_id: str | None = None,
        task: Task = "generate",
        **options: Unpack[RequestOptions],
    ) -> str:
        """Queues a prompt (text or token ids) and returns the request's id. `step` returns its events.

        `task`, `options`: fields of `GenerationRequest` (priority, timeout, cache_salt ...).
        Raises `InvalidRequest`, `QueueFull`, `EngineClosed`.
        """
        if request_id is None:
            request_id = self.new_request_id()
        request = GenerationRequest(id=request_id, prompt=prompt, params=sampling_params(params), task=task, **options)
        self.add(self.prepare(request))
        return request_id

    def cancel(self, request_id: str) -> bool:
        """Ends a request and frees its cells. Returns False if the request is neither waiting nor running."""
        return self._change(lambda: self.core.cancel(request_id))

    def update_request(self, request_id: str, tokens: Sequence[int]) -> bool:
        """Appends tokens to the text of a request, as if the model had generated them; it continues from there.

        They are in the request's next event, and count as generated. Returns False if the request is neither waiting
        nor running. Raises `InvalidRequest` for unknown ids, and for more tokens than `max_tokens` and the context
        allow; before the first token, also for a request with log-probabilities of its prompt.
        """
        return self._change(lambda: self.core.update(request_id, tokens))

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything or return events."""
        return self.core.has_work

    def step(self) -> list[GenerationEvent]:
        """Computes one batch and returns the new events of all requests, except those that another call is waiting
        for."""

        def step() -> list[GenerationEvent]:
            self.core.step()
            return self.core.outputs.take_all()

        return self._change(step)

    def _change(self, work: Callable[[], Result]) -> Result:
        """Calls `work` with access. Raises `RuntimeError` in a callback of a step, whose sequences it would change."""
        self.access.check_outside()
        return self.access.run(work)

    def chat_format(self, template: str | None = None) -> ChatFormat:
        """The model's chat format: its template, tool calls and reasoning, or those of another template.

        Raises `ConfigError` for an unknown template, `InvalidRequest` if the model's own is broken.
        """
        chat = self._chat_formats.get(template)
        if chat.token_ids is None:
            tokens = {marker: self.tokens(marker, add_special=False) for marker in chat.markers}
            self._chat_formats.add_tokens(chat, tokens)
        return chat

    # --- state and end ------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counters since the start, and the current state."""
        return self.access.run(self.core.stats)

    def live(self) -> LiveEngine:
        """The live state of the engine: sequences, queue and KV cell ownership."""
        return self.access.run(self.core.live)

    def clear_prefix_cache(self) -> None:
        """Removes all cached prefixes, and frees their cells and host memory."""
        self._change(self.core.kv.clear_cache)

    def close(self) -> None:
        """Cancels all requests and frees the model. Repeated calls, and calls in a fork, do nothing."""
        if not self.core.process.is_fork:
            self.access.soon(self.core.close)

    def __del__(self) -> None:
        core: EngineCore | None = self.__dict__.get("core")  # missing if loading failed
        if core is None or core.is_closed or core.process.is_fork:
            return
        try:
            warn_unclosed(self)
        finally:
            core.free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
