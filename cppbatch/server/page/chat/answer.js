// @ts-check
// One answer of /v1/chat/completions: its request, its stream, and what its errors mean to the reader. No DOM.
import {events} from '../api.js';
import {count} from '../format.js';
import {DEFAULT_MAX_TOKENS, defaultsOf, requestFields} from '../sampling_form.js';
import {requestMessages} from './conversation.js';

/** The request for an answer below the message `from`, with a maximum of tokens if the server has none. Throws SyntaxError if the tools or the JSON schema are not JSON. */
export function requestBody(conversation, from, isContinued, server) {
  const {settings, tools, thinking, model} = conversation;
  return {
    ...(model && {model}),
    messages: requestMessages(conversation, from),
    ...(server?.info.props && !defaultsOf(server).max_tokens && {max_tokens: DEFAULT_MAX_TOKENS}),
    ...requestFields(settings),
    ...(tools.trim() && {tools: JSON.parse(tools)}),
    ...(thinking !== 'auto' && {chat_template_kwargs: {enable_thinking: thinking === 'on'}}),
    ...(isContinued && {continue_final_message: true, add_generation_prompt: false}),
  };
}

/**
 * Reads an answer. onChange gets the message's fields whenever some text has arrived.
 *
 * @param {object} body the request, without stream
 * @param {{signal: AbortSignal, onChange: (fields: object) => void, begin?: {content?: string, reasoning?: string}}}
 *   how begin: the text so far of a message that is continued
 */
export async function readAnswer(body, {signal, onChange, begin = {}}) {
  const started = performance.now();
  const message = {content: '', reasoning: '', ...begin, calls: [], finish: null, stats: null};
  let firstToken = null;
  let deltas = 0;
  const request = {...body, stream: true, stream_options: {include_usage: true}, return_progress: true};
  for await (const chunk of events('/v1/chat/completions', {body: request, signal, retries: 3})) {
    const [choice] = chunk.choices ?? [];
    const delta = choice?.delta ?? {};
    if (delta.content || delta.reasoning_content || delta.tool_calls) {
      firstToken ??= performance.now();
      const spent = (performance.now() - firstToken) / 1000;
      message.stats = {tokens: ++deltas, rate: spent > 0.25 ? (deltas - 1) / spent : null};
    }
    message.content += delta.content ?? '';
    message.reasoning += delta.reasoning_content ?? '';
    if (delta.tool_calls) message.calls = withDeltas(message.calls, delta.tool_calls);
    message.progress = firstToken ? null : chunk.prompt_progress ?? message.progress ?? null;
    if (choice?.finish_reason) message.finish = choice.finish_reason;
    if (choice?.finish_reason || chunk.usage || chunk.timings) {
      message.stats = {...message.stats, ...statsOf(chunk), ttft: (firstToken - started) / 1000 || null};
    }
    onChange({...message});
  }
}

function statsOf({usage, timings, choices}) {
  return {
    ...(usage && {tokens: usage.completion_tokens, prompt: usage.prompt_tokens,
      cached: usage.prompt_tokens_details?.cached_tokens ?? 0}),
    ...(timings && {rate: timings.predicted_n > 1 ? timings.predicted_per_second : null}),
    ...(choices?.[0]?.seed !== undefined && {seed: choices[0].seed}),
  };
}

function withDeltas(calls, deltas) {
  const next = [...calls];
  for (const {index, id, function: called} of deltas) {
    const call = next[index] ?? {id: '', name: '', args: ''};
    next[index] = {
      id: id ?? call.id, name: call.name + (called?.name ?? ''), args: call.args + (called?.arguments ?? ''),
    };
  }
  return next;
}

export const isTooLong = (error) => error.code === 'context_length_exceeded';

/** What went wrong and what to do, in a sentence or two. content: what has arrived of the answer. */
export function adviceOf(error, health, content) {
  const said = error.message.replace(/\.$/, '');
  const soon = 'Try again in a moment.';
  if (error.status === 0) {
    const isGone = health?.status === 'unreachable';
    return `${said}. ${content ? 'The answer so far is kept' : 'Your message is kept'}: ${isGone ? 'restart the server, then ' : ''}try again.`;
  }
  if (isTooLong(error)) {
    const sizes = error.tokens && ` (${count(error.tokens)} of ${count(error.context)} tokens)`;
    return `The conversation does not fit into the model’s context${sizes || ''}: delete messages, or start a new conversation.`;
  }
  if (error.status === 401) return 'The server requires an API key: enter it with the button at the top, then try again.';
  if (error.status === 403) return `The API key does not allow this: ${said}.`;
  if (error.status === 429) return `The server is busy: ${said}. ${soon}`;
  if (error.status === 503) return `The server is not accepting requests: ${said}. ${soon}`;
  return error.param ? `The server rejected ${error.param}: ${said}.` : `The answer failed: ${said}.`;
}
