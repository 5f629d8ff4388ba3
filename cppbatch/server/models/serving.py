"""The engine and settings of this server, and the conversion of request bodies to engine requests."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from cppbatch import __version__
from cppbatch.chat.capabilities import TemplateCaps
from cppbatch.chat.chat_format import ChatFormat, ChatForms, ChatTurn, PreparedChat
from cppbatch.chat.output_parser import PlainTextParser
from cppbatch.chat.template import NO_TEMPLATE, ChatTemplate
from cppbatch.cluster.engines.client import EngineClient
from cppbatch.engine.media.sources import prompt_of_chat
from cppbatch.engine.model_info import ModelInfo
from cppbatch.engine.params import GRAMMARS, UNLIMITED, SamplingParams, replace_fields
from cppbatch.engine.request import GenerationRequest, MediaPrompt, TokenPiece, expand
from cppbatch.errors import ContextOverflow, InvalidRequest, client_names
from cppbatch.llama import apply_builtin_template
from cppbatch.models.find import shorter_names
from cppbatch.server.auth.rules import KeyRules
from cppbatch.server.fields.sampling import SamplingFields
from cppbatch.server.http.api_errors import ModelNotFound
from cppbatch.server.http.limits import Limits
from cppbatch.server.media_loading import MediaLoader, refuse_large
from cppbatch.server.run_requests import prompt_name
from cppbatch.server.settings import ServerSettings

log = logging.getLogger("cppbatch.server")

Json = dict[str, Any]
Given = TypeVar("Given")
Prompt = str | list[int] | MediaPrompt

_MAX_TOOLS = 1024  # OpenAI's API accepts 128
_MAX_SEQUENCES = 1024


def new_id(prefix: str) -> str:
    """A new response id, for example `cmpl-…`."""
    return f"{prefix}{uuid.uuid4().hex}"


class ChatTools(NamedTuple):
    """Renders conversations to prompts."""

    format: ChatFormat
    media: MediaLoader
    """Has fetched the media of the conversations."""


class ResolvedRequest(NamedTuple):
    """An HTTP request in the engine's terms."""

    id: str
    """The response id, with which the request ids start."""
    requests: list[GenerationRequest]
    """For each completion of each prompt, grouped by prompt."""
    field_names: dict[str, str]
    """{a field of the requests: the client's name for it}, for errors (`client_names`)."""
    chat: PreparedChat = PreparedChat(prompt="", output_parser=PlainTextParser)
    """The rendered conversation, which creates the parser of the answer; without one, that of plain text."""


class Serving:
    """The engine and settings of this server."""

    def __init__(
        self,
        client: EngineClient,
        settings: ServerSettings,
        names: tuple[str, ...] = (),
        matches_name: Callable[[str], bool] | None = None,
    ) -> None:
        """For a server with several models: `names`: all names of this model; responses show the first one.
        `matches_name`: whether a name in a request refers to this model."""
        self.client = client
        self.settings = settings
        self._names = names
        self._matches_name = matches_name
        self.started = int(time.time())
        self.lora: dict[str | int, float] | None = None
        """The LoRA scales for requests without `lora`, as set by `POST /lora-adapters`. None: those of --lora."""
        self._has_logged_forms = self._has_told_form = False

    @property
    def limits(self) -> Limits:
        """The limits per request and per client."""
        return self.settings.limits

    @property
    def info(self) -> ModelInfo:
        """The loaded model. Raises `EngineClosed` if it is not loaded yet."""
        return self.client.info

    @property
    def name(self) -> str:
        """The name of the model in responses. With a single model: the alphabetically first alias, as in llama-server,
        or else the file name."""
        if self._names:
            return self._names[0]
        return min(self.settings.aliases, default=self.info.name)

    @property
    def fingerprint(self) -> str:
        """`system_fingerprint`: the version, then a digest of everything that may change the text for the same seed:
        versions, model, cache and template. Starts with b, like llama-server's, which starts with its build."""
        info = self.info
        runtime = info.n_ctx, info.kv_layout, info.sampling, info.not_repacked, sorted(info.changes.items())
        return _fingerprint(repr((info.name, info.size_bytes, info.n_params, self.template, *runtime)))

    @property
    def template(self) -> str | None:
        """The chat template: --chat-template, or the model's own. None: ChatML."""
        return self.settings.chat_template or self.info.chat_template

    def check(self, body: SamplingFields) -> None:
        """Raises `InvalidRequest` for an unknown model with --strict-model, an unknown service tier, and exceeded
        limits."""
        self.check_model(body.model)
        body.check_service_tier()
        self.limits.check(body)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names of the model: the file name, with or without the weight type at its end, and the aliases."""
        if self._names:
            return self._names
        own = self.info.name
        return (own, *self.settings.aliases, *shorter_names(own))

    def find_model(self, name: str) -> None:
        """Raises `ModelNotFound` unless `name` is one of `model_names`."""
        if name not in self.model_names:
            known = ", ".join(map(repr, (self.info.name, *self.settings.aliases)))
            raise ModelNotFound(f"{name!r} not found; available: {known} (--alias adds names)")

    def check_key(self, rules: KeyRules, model: str | None = None) -> None:
        """Raises `Forbidden` unless the key allows the loaded model, and `model`, if given, is one of its names."""
        if rules.models is not None:
            rules.check_model(self.model_names, model)

    def check_model(self, name: str | None) -> None:
        """With --strict-model, raises `ModelNotFound` for an unknown model; otherwise a single model answers to any
        name. None is always accepted. Raises `InvalidRequest` for a different one of several models."""
        if self._matches_name:
            if name is not None and not self._matches_name(name):
                raise InvalidRequest(
                    "model", f"is {name!r}, but this request is answered by {self.name!r}; send separate requests"
                )
        elif self.settings.strict_model and name is not None:
            self.find_model(name)

    def check_size(self, body: object) -> None:
        """Raises `InvalidRequest` for more messages than the context has tokens, since building a `ChatTurn` from them
        would take too long."""
        most = self.info.max_sequence
        for field in ("messages", "input"):
            messages = getattr(body, field, None)
            if isinstance(messages, list) and len(messages) > most:
                overflow = ContextOverflow(n_prompt_tokens=len(messages), n_ctx=most, is_least=True)
                message = f"has {len(messages):,} messages; the context holds only {most:,} tokens"
                raise InvalidRequest(field, message, overflow)

    async def resolve(self, turn: ChatTurn, body: SamplingFields, id_prefix: str) -> ResolvedRequest:
        """The engine requests of a turn, with the sampling fields of its body, which `check` and `check_size` have
        accepted. Runs on another thread, because rendering long conversations and decoding images and audio take time.

        `id_prefix`: of the response's id, for example `chatcmpl-`. Raises `InvalidRequest`.
        """
        tools = await self.chat_tools([turn.messages])
        name = new_id(id_prefix)
        return await self.client.render(tools.format, lambda: self.resolve_with(tools, turn, body, name))

    def resolve_with(self, tools: ChatTools, turn: ChatTurn, body: SamplingFields, response_id: str) -> ResolvedRequest:
        """Makes the engine requests on this thread."""
        chat = self.render_with(tools, turn)
        requests = self.engine_requests(body, response_id, [prompt_of_chat(chat)], chat.params)
        return ResolvedRequest(response_id, requests, body.field_names | chat.field_names, chat)

    async def render(self, turn: ChatTurn) -> PreparedChat:
        """The prompt of a turn. Raises `InvalidRequest`."""
        tools = await self.chat_tools([turn.messages])
        return await self.client.render(tools.format, lambda: self.render_with(tools, turn))

    async def chat_tools(self, conversations: Sequence[list[Json]]) -> ChatTools:
        """The renderer of these conversations. Raises `InvalidRequest` for a broken template."""
        tools = ChatTools(await self.chat_format(), self.media_loader())
        await tools.media.fetch(conversations)
        return tools

    def media_loader(self) -> MediaLoader:
        """The loader of a request's images and audio."""
        return MediaLoader(self.settings, self.info)

    def render_with(self, tools: ChatTools, turn: ChatTurn) -> PreparedChat:
        """`ChatFormat.render` with the server's template variables (--chat-template-kwargs), reasoning limit
        (--reasoning-budget) and reading of control tokens (--parse-special)."""
        if turn.tools and not self._has_told_form:
            self._has_told_form = True
            if self.chat_forms and self.chat_forms.tools_described_by == "message":
                log.warning("the chat template of %s does not render tools: %s", self.name, self.chat_forms)
        if len(turn.tools) > _MAX_TOOLS:
            raise InvalidRequest("tools", f"has {len(turn.tools):,} tools; the limit is {_MAX_TOOLS:,}")
        messages = turn.messages
        if self.settings.system and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": self.settings.system}, *messages]
        turn = replace(
            turn,
            messages=tools.media.load(messages),
            variables=self.settings.template_variables | turn.variables,
            thinking_tokens=_given(turn.thinking_tokens, self.settings.thinking_tokens),
            thinking_message=_given(turn.thinking_message, self.settings.thinking_message),
            reads_reasoning=_given(turn.reads_reasoning, self.settings.reasoning_format != "none"),
            reads_answer=turn.reads_answer and not self.settings.skip_chat_parsing,
            continue_final_message=_given(
                turn.continue_final_message, None if self.settings.prefill_assistant else False
            ),
            parse_special=_given(turn.parse_special, self.settings.parse_special),
        )
        return tools.format.render(turn)

    @property
    def max_length(self) -> int:
        """The characters or token ids of a prompt that is tokenised for a response: enough for the context."""
        # a Mi characters or token ids are always accepted; no text has 32 characters per token on average
        return max(1 << 20, 32 * self.info.max_sequence)

    def check_length(self, field: str, n: int) -> None:
        """Raises `InvalidRequest` for a prompt of more than `max_length` characters or token ids."""
        if n > self.max_length:
            raise InvalidRequest(field, f"is {n:,} long; the limit is {self.max_length:,} characters or token ids")

    async def chat_tokens(self, chat: PreparedChat) -> list[TokenPiece]:
        """The tokens of a chat's prompt. Raises `InvalidRequest`."""
        with client_names(chat.field_names):
            self.check_length("prompt", len(chat.prompt))
            return await self.client.tokenize(prompt_of_chat(chat))

    def default_params(self, max_tokens: int = UNLIMITED) -> Json:
        """Default fields of `SamplingParams` for requests that do not set them.

        `max_tokens`: the API's own default, for a server without -n.
        """
        defaults = {"max_tokens": max_tokens, **self.settings.sampling_defaults}
        return defaults | {"max_tokens": self.limits.default_tokens(defaults["max_tokens"])}

    def params(self, body: SamplingFields, required: Json | None = None, max_tokens: int = UNLIMITED) -> SamplingParams:
        """A request's sampling parameters: its own fields, else those required by its chat or response format, else the
        server's defaults. Raises `InvalidRequest`.

        `required`: `PreparedChat.params`; None: the prompt is not a chat. `max_tokens`: as for `default_params`.
        """
        if required is None:
            schema = body.schema()
            required = {} if schema is None else {"json_schema": schema}
        defaults = self.default_params(max_tokens)
        if body.constraint or not required.keys().isdisjoint(GRAMMARS):  # in place of --grammar and --json-schema
            defaults = {name: value for name, value in defaults.items() if name not in GRAMMARS}
        params = body.params(**defaults | required)
        limit = self.limits.default_tokens(UNLIMITED)
        if params.max_tokens != UNLIMITED or limit == UNLIMITED:
            return params
        return replace(params, max_tokens=limit)  # validates again: min_tokens may exceed the limit

    def engine_requests(
        self,
        body: SamplingFields,
        name: str,
        prompts: Sequence[Prompt],
        required: Json | None = None,
        max_tokens: int = UNLIMITED,
        *,
        texts: Sequence[str] | None = None,
    ) -> list[GenerationRequest]:
        """An engine request for each completion of each prompt, grouped by prompt. Their ids start with `name`.

        `required`, `max_tokens`: as for `params`. `texts`: of prompts that are token ids. Raises `InvalidRequest`, also
        if there are too many.
        """
        if self.settings.prompts_dir:
            _write_prompts(self.settings.prompts_dir, texts or prompts)
        params = self.params(body, required, max_tokens)
        n = body.n_candidates
        if len(prompts) * n > _MAX_SEQUENCES:
            message = f"requests {len(prompts)} prompts x {n} completions; the limit per request is {_MAX_SEQUENCES}"
            raise InvalidRequest("prompt", message)
        refuse_large(prompts, n, self.limits)
        timeout = self.limits.timeout(body.timeout)
        options = {"lora": self.lora, **body.options(), "timeout": timeout, "clamp_max_tokens": True}
        each = expand([params], n, ranked=n > body.n_choices)
        requests = []
        for p, prompt in enumerate(prompts):
            with prompt_name(p, len(prompts)):
                first = GenerationRequest(id=f"{name}-{p * n}", prompt=prompt, params=each[0], **options)
            # `replace_fields` does not validate again: 128 choices would parse a large schema 128 times.
            requests += [first, *(replace_fields(first, id=f"{name}-{p * n + i}", params=each[i]) for i in range(1, n))]
        return requests

    async def chat_format(self) -> ChatFormat:
        """The model's chat format. Raises `InvalidRequest` for a broken template."""
        if not self._has_logged_forms:  # on another thread, because it is compiled
            await asyncio.wrap_future(self.client.chat_formats.submit(lambda: self._own_template))
        chat = await self.client.chat_format(self._own_template)
        if not self._has_logged_forms:
            self._has_logged_forms = True
            log.info("chats of %s: %s", self.name, await self.learn_chat_forms())
            if self.template is None:
                log.warning("%s: %s", self.name, NO_TEMPLATE)
        return chat

    async def learn_chat_forms(self) -> ChatForms | None:
        """`chat_forms`, learned on another thread, because that may take a second or two."""
        return await asyncio.wrap_future(self.client.chat_formats.submit(lambda: self.chat_forms))

    async def learn_template_caps(self) -> TemplateCaps | None:
        """What the chat template supports, learned on another thread; None for a broken template."""

        def learn() -> TemplateCaps | None:
            try:
                return self.client.chat_formats.get(self._own_template).template.caps
            except InvalidRequest:
                return None

        return await asyncio.wrap_future(self.client.chat_formats.submit(learn))

    @cached_property
    def chat_forms(self) -> ChatForms | None:
        """How the model writes tool calls and reasoning; None for a broken template. Does not query a worker."""
        try:
            return self.client.chat_formats.get(self._own_template).forms
        except InvalidRequest:
            return None

    @cached_property
    def _own_template(self) -> ChatTemplate | None:
        """The chat format of --chat-template."""
        given, info = self.settings.chat_template, self.info
        return ChatTemplate(given, bos=info.bos, eos=info.eos, apply_named=apply_builtin_template) if given else None


def _given(of_request: Given, default: Given) -> Given:
    return default if of_request is None else of_request


def _write_prompts(folder: Path, prompts: Sequence[Prompt]) -> None:
    """Writes each prompt to a file of its own, named by the time."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for i, prompt in enumerate(prompts):
            text = prompt if isinstance(prompt, str) else str(prompt)
            (folder / f"{time.time_ns() // 1000:016}-{i}.txt").write_text(text, "utf-8", errors="backslashreplace")
    except OSError as error:
        log.warning("--log-prompts-dir %s cannot be written: %s", folder, error.strerror)


@lru_cache(64)  # each request needs it, and reading the version takes half a millisecond
def _fingerprint(decisive: str) -> str:
    digest = sha256(f"{version('llama-cpp-python')} {decisive}".encode(errors="surrogatepass")).hexdigest()
    return f"b{__version__}-{digest[:8]}"
