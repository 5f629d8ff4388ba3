// @ts-check
// How full the model's context is with the message that is being written.
import {request as call} from '../api.js';
import {html, useEffect, useState} from '../components.js';
import {count, percent} from '../format.js';

const PAUSE_MS = 400; // after the last key
const FULL = 0.9;

/** The tokens of a text; undefined if the server does not say. model: of several. */
export const tokensOf = (text, model) => call('/tokenize', {body: {content: text, ...(model && {model})}})
  .then(({tokens}) => tokens.length, () => undefined);

/** The tokens of a request with this message, with those of the chat template; undefined if the server does not say, and
 * with images or audio. */
function wholeOf({messages, tools, ...body}, text) {
  const asked = text ? [...messages, {role: 'user', content: text}] : messages;
  if (!asked.length || asked.some(({content}) => Array.isArray(content))) return undefined; // media: in the answer's usage
  return Promise.resolve().then(() => call('/v1/chat/completions/input_tokens', {body: {...body, messages: asked,
    ...(tools && {tools: JSON.parse(tools)})}})).then((answer) => answer.input_tokens, () => undefined);
}

/** What happens at the end of the context: of the tokens after the first `keep`, half are dropped; null: the text ends. */
function Shift({limit, keep}) {
  if (keep === null || keep === undefined) return null;
  const dropped = keep < 0 ? 'the older half of the answer' : `the oldest ${count(Math.floor((limit - keep) / 2))} tokens${
    keep > 0 ? ` after the first ${count(keep)}` : ''}`;
  return html`; when it is full, the model forgets ${dropped}`;
}

/** text: what is written; used: tokens of the messages so far, 0 before the first answer, when `request` gives the whole
 * conversation to count; limit: of the context; keep: as in Shift. */
export function ContextMeter({text, used, limit, keep, request, model}) {
  const [all, setAll] = useState(0);
  useEffect(() => {
    let isLatest = true;
    const timer = setTimeout(async () => {
      const whole = used ? undefined : await wholeOf(request(), text);
      const tokens = whole ?? used + ((text && await tokensOf(text, model)) || 0);
      if (isLatest) setAll(tokens);
    }, PAUSE_MS);
    return () => {
      isLatest = false;
      clearTimeout(timer);
    };
  }, [text, used, model]);
  if (!all) return null;
  const share = all / limit;
  return html`<p class=${`context-meter small number ${share > FULL ? 'full' : 'muted'}`}>
    <meter min="0" max=${limit} value=${Math.min(all, limit)} high=${FULL * limit} aria-label="Context used"></meter>
    ${count(all)} of ${count(limit)} tokens (${percent(share)})${share > 1 ? ': too long; shorten it or start a new conversation'
      : html`<${Shift} limit=${limit} keep=${keep} />`}</p>`;
}
