// @ts-check
// How full the model's context is with the message that is being written.
import {request} from '../api.js';
import {html, useEffect, useState} from '../components.js';
import {count, percent} from '../format.js';

const PAUSE_MS = 400; // after the last key
const FULL = 0.9;

/** The tokens of a text; undefined if the server does not say. model: of several. */
export const tokensOf = (text, model) => request('/tokenize', {body: {content: text, ...(model && {model})}})
  .then(({tokens}) => tokens.length, () => undefined);

/** text: what is written; used: tokens of the messages so far; limit: of the context. */
export function ContextMeter({text, used, limit, model}) {
  const [own, setOwn] = useState(0);
  useEffect(() => {
    let isLatest = true;
    const timer = setTimeout(async () => {
      const tokens = text ? await tokensOf(text, model) : 0;
      if (isLatest) setOwn(tokens);
    }, PAUSE_MS);
    return () => {
      isLatest = false;
      clearTimeout(timer);
    };
  }, [text, model]);
  const all = used + (own ?? 0);
  if (!all) return null;
  const share = all / limit;
  return html`<p class=${`context-meter small number ${share > FULL ? 'full' : 'muted'}`}>
    <meter min="0" max=${limit} value=${Math.min(all, limit)} high=${FULL * limit} aria-label="Context used"></meter>
    ${count(all)} of ${count(limit)} tokens (${percent(share)})${share > 1 && ': too long; shorten it or start a new conversation'}</p>`;
}
