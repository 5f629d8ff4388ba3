// @ts-check
// Calls of the server's API. Every call sends the API key, in a header.
//
//   request(path, {method, body, signal, retries}) -> parsed JSON (text, if the answer is not JSON)
//   events(path, {method, body, signal, retries})  -> async iterator over the parsed data of server-sent events
//   open(path, options) -> Response, for bodies that are streamed or saved
//   ApiError {status, message, param, code, type, retryAfter, tokens, context}; status 0: the server cannot be reached
//   isAbort(error): the caller's signal has ended the call
//   key() / setKey(key) / onKeyWanted(ask): the API key; `ask` is called once on a 401 and resolves to true when there
//   is another key
//
// body: an object becomes JSON; FormData, Blob and strings are sent as they are. retries: how often a 429 or 503 is
// tried again after its Retry-After (0). onAlive (of events): called whenever anything arrives, comments too.

const BASE = new URL('..', import.meta.url);
const KEY = 'cppbatch.key';
const MAX_WAIT = 30;

/** @typedef {{method?: string, body?: any, signal?: AbortSignal, retries?: number, headers?: Record<string, string>,
 * onAlive?: () => void}} Options */

export class ApiError extends Error {
  constructor(status, message, {param = null, code = null, type = null, retryAfter = 0, tokens = null, context = null} = {}) {
    super(message);
    Object.assign(this, {name: 'ApiError', status, param, code, type, retryAfter, tokens, context});
  }
}

let askForKey = null;
let asking = null;
let sessionKey = '';

export function key() {
  try {
    return localStorage.getItem(KEY) ?? sessionKey;
  } catch {
    return sessionKey;
  }
}

export function setKey(value) {
  sessionKey = value;
  try {
    if (value) localStorage.setItem(KEY, value);
    else localStorage.removeItem(KEY);
  } catch { /* no storage: the key lasts as long as this page */ }
}

export function onKeyWanted(ask) {
  askForKey = ask;
}

export const isAbort = (error) => error?.name === 'AbortError';

/** @param {string} path @param {Options} options @returns {Promise<Response>} */
export async function open(path, options = {}) {
  let retries = options.retries ?? 0;
  for (let asked = false; ;) {
    const used = key();
    const response = await send(path, options, used);
    if (response.ok) return response;
    const error = await errorOf(response);
    if (response.status === 401 && askForKey && !asked) {
      asked = true;
      if (key() !== used || await wantKey()) continue;
    } else if ((response.status === 429 || response.status === 503) && retries-- > 0) {
      await sleep(Math.min(error.retryAfter || 1, MAX_WAIT), options.signal);
      continue;
    }
    throw error;
  }
}

/** @param {string} path @param {Options} options @returns {Promise<any>} */
export async function request(path, options = {}) {
  const response = await open(path, options);
  const isJson = (response.headers.get('Content-Type') || '').includes('json');
  return isJson ? response.json() : response.text();
}

/** @param {string} path @param {Options} options */
export async function* events(path, options = {}) {
  const response = await open(path, {...options, headers: {Accept: 'text/event-stream', ...options.headers}});
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = '';
  try {
    for (;;) {
      const {done, value} = await reader.read().catch((error) => {
        throw isAbort(error) ? error : new ApiError(0, 'Lost the connection to the server.');
      });
      if (done) return;
      options.onAlive?.();
      text += value.replaceAll('\r', '');
      const blocks = text.split('\n\n');
      text = blocks.pop();
      for (const block of blocks) {
        const data = dataOf(block);
        if (data === '[DONE]') return;
        if (!data) continue;
        const event = JSON.parse(data);
        if (event?.error && event.index === undefined) throw apiError(event.error.code_status ?? 500, event.error);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function dataOf(block) {
  const lines = block.split('\n').filter((line) => line.startsWith('data:'));
  return lines.map((line) => line.slice(5).trimStart()).join('\n');
}

async function send(path, {method, body, signal, headers}, apiKey) {
  const isPlain = body === undefined || typeof body === 'string' || body instanceof FormData || body instanceof Blob;
  const sent = {
    ...(isPlain ? {} : {'Content-Type': 'application/json'}),
    ...(apiKey ? {Authorization: `Bearer ${apiKey}`} : {}),
    ...headers,
  };
  try {
    return await fetch(new URL(path.replace(/^\//, ''), BASE), {
      method: method ?? (body === undefined ? 'GET' : 'POST'),
      body: isPlain ? body : JSON.stringify(body),
      headers: sent,
      signal,
      cache: 'no-store',
    });
  } catch (error) {
    if (isAbort(error)) throw error;
    throw new ApiError(0, 'Cannot reach the server.');
  }
}

async function errorOf(response) {
  const retryAfter = Number(response.headers.get('Retry-After')) || 0;
  const body = await response.json().catch(() => null);
  const error = body?.error ?? `status ${response.status}`; // a text: Ollama's form
  return apiError(response.status, error.message ? error : {message: error}, retryAfter);
}

function apiError(status, error, retryAfter = 0) {
  const {message = 'unknown error', param, code, type, n_prompt_tokens: tokens, n_ctx: context} = error;
  return new ApiError(status, message, {param, code, type, retryAfter, tokens, context});
}

async function wantKey() {
  asking ??= askForKey().finally(() => { asking = null; });
  return asking;
}

function sleep(seconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, seconds * 1000);
    signal?.addEventListener('abort', () => {
      clearTimeout(timer);
      reject(signal.reason);
    }, {once: true});
  });
}
