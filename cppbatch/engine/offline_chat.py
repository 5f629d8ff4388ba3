"""`chat` and `chat_stream` of `BatchInferenceEngine`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, overload

from cppbatch.engine.chat_results import ChatCompletion, ChatEvent, ChatReader, ChatStream
from cppbatch.engine.chats import ChatOptions, ChatRequests, Conversation, several_conversations
from cppbatch.engine.offline import Prepared, complete, params_for_each, prepare_chat, run
from cppbatch.engine.params import Params, SamplingParams
from cppbatch.engine.request import GenerationEvent
from cppbatch.engine.request_engine import RequestEngine
from cppbatch.errors import InvalidRequest

if TYPE_CHECKING:
    from typing_extensions import Unpack

OnChatEvent = Callable[[int, ChatEvent], object]


@overload
def chat(  # type: ignore[overload-overlap]  # a str is a sequence of str, but means one conversation
    engine: RequestEngine,
    conversations: Conversation,
    params: Params = None,
    *,
    progress: bool | None = None,
    on_event: Callable[[int, ChatEvent], object] | None = None,
    **options: Unpack[ChatOptions],
) -> ChatCompletion: ...


@overload
def chat(
    engine: RequestEngine,
    conversations: Sequence[Conversation],
    params: Params | Sequence[SamplingParams] = None,
    *,
    progress: bool | None = None,
    on_event: Callable[[int, ChatEvent], object] | None = None,
    **options: Unpack[ChatOptions],
) -> list[ChatCompletion]: ...


def chat(
    engine: RequestEngine,
    conversations: Conversation | Sequence[Conversation],
    params: Params | Sequence[SamplingParams] = None,
    *,
    progress: bool | None = None,
    on_event: OnChatEvent | None = None,
    **options: Unpack[ChatOptions],
) -> ChatCompletion | list[ChatCompletion]:
    """Generates the assistant's next message in a conversation, or in each of several, batched together.

    A conversation is a list of OpenAI's messages, or a string, which is a single user message. One conversation gives
    one result; a list of conversations gives a list in the same order:

        engine.chat("Why is the sky blue?").text
        engine.chat([{"role": "user", "content": "Hello"}], system="Answer in French.").message
        engine.chat([f"Translate: {text}" for text in texts], SamplingParams(max_tokens=50))

    The model's chat template renders the prompt, and the text is parsed as on the server: reasoning, answer, tool
    calls. `params`: one for all, or a list with one per conversation; its `json_schema` applies to the answer, before
    which the model may reason or call tools. `progress`: a progress line on stderr; `on_event`: called with each
    `ChatEvent`. `options`: `system`, `tools`, `tool_choice` and the other `ChatOptions`, and fields of
    `GenerationRequest`.

    Raises `InvalidRequest` naming the invalid field or conversation, before any of them runs; `ConfigError` for an
    unknown `chat_template`. Ctrl-C cancels all of them.
    """
    several, is_one = several_conversations(conversations)
    each_params = params_for_each("conversations", several, params)
    requests = ChatRequests(engine.chat_format(options.get("chat_template")), options)
    prepared: list[Prepared] = []
    for i, (conversation, its) in enumerate(zip(several, each_params, strict=True)):
        try:
            prepared.append(prepare_chat(engine, *requests.request(engine.new_request_id(), conversation, its)))
        except InvalidRequest as error:
            if is_one:
                raise
            raise InvalidRequest(f"conversations[{i}]", str(error), error.overflow) from error
    readers = [ChatReader(each.chat) for each in prepared if each.chat] if on_event else []

    def read(i: int, event: GenerationEvent) -> None:
        assert on_event
        on_event(i, readers[i].read(event))

    results = complete(engine, prepared, "answering", progress=progress, on_event=read if on_event else None)
    answers = [result for result in results if isinstance(result, ChatCompletion)]
    return answers[0] if is_one else answers


def chat_stream(
    engine: RequestEngine, conversation: Conversation, params: Params = None, **options: Unpack[ChatOptions]
) -> ChatStream:
    """Generates the assistant's next message and yields its `ChatEvent`s as they are created.

    `with engine.chat_stream(messages) as stream:` cancels the message on leaving the block, like `stream.close()`.
    `stream.message` is the message so far. The arguments are those of `chat`, for one conversation. Raises
    `InvalidRequest`, `ConfigError`, and at the first event `QueueFull`.
    """
    requests = ChatRequests(engine.chat_format(options.get("chat_template")), options)
    prepared = prepare_chat(engine, *requests.request(engine.new_request_id(), conversation, params))
    assert prepared.chat
    return ChatStream(run(engine, [prepared.sequence], limited=True), prepared.chat)
