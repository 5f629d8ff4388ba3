// @ts-check
// Downloads from the hub by POST /api/pull, which end with the page or by cancel().
//
//   downloads.all    [{model, completed, total, error}]   total: 0 until the hub has answered; error: it has failed
//   downloads.start(model, onDone), cancel(model)   also takes one that has failed off the list
//   downloads.subscribe(listener) -> unsubscribe
//   fitText(fit)   whether a model fits into memory, as GET /v1/models and /models/hub say it
import {isAbort, open} from '../api.js';

export const fitText = (fit) => ({yes: 'fits', '?': 'unknown'})[fit]
  ?? fit.replace('with smaller -np -c', 'fits with fewer sequences');

class Downloads {
  all = [];
  #controllers = new Map();
  #listeners = new Set();

  subscribe(listener) {
    this.#listeners.add(listener);
    return () => { this.#listeners.delete(listener); };
  }

  #put(model, fields) {
    const now = this.all.find((each) => each.model === model) ?? {model, completed: 0, total: 0, error: null};
    this.all = [...this.all.filter((each) => each !== now), ...(fields ? [{...now, ...fields}] : [])];
    this.#listeners.forEach((listener) => listener());
  }

  cancel(model) {
    this.#controllers.get(model)?.abort();
    this.#put(model, null);
  }

  async start(model, onDone) {
    const controller = new AbortController();
    this.#controllers.set(model, controller);
    this.#put(model, {completed: 0, total: 0, error: null});
    try {
      for await (const {error, completed, total} of steps(model, controller.signal)) {
        if (error) throw new Error(error);
        if (total) this.#put(model, {completed, total});
      }
      this.#put(model, null);
      onDone(model);
    } catch (error) {
      if (!isAbort(error)) this.#put(model, {error: error.message});
    } finally {
      this.#controllers.delete(model);
    }
  }
}

/** The lines of the answer. Throws if it ends before the last one. */
async function* steps(model, signal) {
  const {body} = await open('/api/pull', {body: {model}, signal});
  let text = '';
  let last = null;
  for await (const piece of body.pipeThrough(new TextDecoderStream())) {
    const lines = (text + piece).split('\n');
    text = lines.pop();
    for (const line of lines.filter(Boolean)) yield last = JSON.parse(line);
  }
  if (last?.status !== 'success' && !last?.error) throw new Error('Lost the connection to the server.');
}

export const downloads = new Downloads();
