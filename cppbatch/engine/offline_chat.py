"""The code behind `chat` and `chat_stream` of `BatchInferenceEngine`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cppbatch.engine.chat_requests import ChatOptions, ChatRequests, Conversation, several_conversations
from cppbatch.engine.chat_results import ChatCompletion, ChatEvent, ChatReader, ChatStream
from cppbatch.engine.offline import Engine, Prepared, complete, params_for_each, prepared_chat, run
from cppbatch.engine.params import Params, SamplingParams
from cppbatch.engine.request import GenerationEvent
from cppbatch.errors import InvalidRequest

OnChatEvent = Callable[[int, ChatEvent], object]


def chat(
    engine: Engine,
    conversations: Conversation | Sequence[Conversation],
    params: Params | Sequence[SamplingParams],
    *,
    progress: bool,
    on_event: OnChatEvent | None,
    options: ChatOptions,
) -> ChatCompletion | list[ChatCompletion]:
    """See `BatchInferenceEngine.chat`."""
    several, is_one = several_conversations(conversations)
    each_params = params_for_each("conversations", several, params)
    requests = ChatRequests(engine.chat_format(options.get("chat_template")), options)
    prepared: list[Prepared] = []
    for i, (conversation, its) in enumerate(zip(several, each_params, strict=True)):
        try:
            prepared.append(prepared_chat(engine, requests.request(engine.new_request_id(), conversation, its)))
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


def chat_stream(engine: Engine, conversation: Conversation, params: Params, options: ChatOptions) -> ChatStream:
    """See `BatchInferenceEngine.chat_stream`."""
    requests = ChatRequests(engine.chat_format(options.get("chat_template")), options)
    prepared = prepared_chat(engine, requests.request(engine.new_request_id(), conversation, params))
    assert prepared.chat
    return ChatStream(run(engine, [prepared.sequence], limited=True), prepared.chat)
