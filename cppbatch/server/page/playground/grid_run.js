// One run: a stream of `/generate/batch` and the cells that it fills. No DOM.

/** The answer to one prompt with one object of `params`. */
export class Cell {
  state = 'waiting'; // then running, and one of done, stopped, failed
  text = '';
  tokens = []; // {text, logprob, top: [{text, logprob}]}
  totalLogprob = 0;
  reason = ''; // why it failed, or the finish reason
  seed = null; // of its text, once it has ended

  constructor(index, label) {
    Object.assign(this, {index, name: label ? `${index + 1}. ${label}` : `Cell ${index + 1}`});
  }

  get ended() {
    return this.state !== 'waiting' && this.state !== 'running';
  }

  /** The end token counts, as when the server chooses the `best_of` several completions. */
  get meanLogprob() {
    return this.totalLogprob / this.tokens.length;
  }

  /** Tokens per second behind the first event; NaN before there are any. */
  get rate() {
    return (1000 * (this.tokens.length - this.firstTokens)) / (this.lastAt - this.firstAt);
  }

  /** Reads an event of the stream, at `now` milliseconds. */
  read({error, text = '', token_texts: texts, logprobs = [], finish_reason: reason, seed = null}, now) {
    if (error) return Object.assign(this, {state: 'failed', reason: error.message});
    this.text += text;
    logprobs.forEach(({token, logprob, top_logprobs: top}, i) => {
      this.tokens.push({text: texts[i] ?? token, logprob, top: top.map((each) => ({text: each.token, ...each}))});
      this.totalLogprob += logprob;
    });
    if (logprobs.length) {
      this.firstAt ??= now;
      this.firstTokens ??= logprobs.length;
      this.lastAt = now;
    }
    if (!reason) return Object.assign(this, {state: 'running'});
    return Object.assign(this, {state: reason === 'cancelled' ? 'stopped' : 'done', reason, seed});
  }
}

export class GridRun {
  startedAt = performance.now();
  endedAt = 0;
  error = ''; // why cells failed that have no reason
  #abort = new AbortController();
  #listeners = new Map();
  #changed = new Set();

  /** plan: of `planRun`. schedule: calls a function before the next frame. */
  constructor({body, labels}, api, schedule) {
    Object.assign(this, {asked: body, api, schedule});
    this.cells = labels.map((label, index) => new Cell(index, label));
    this.id = crypto.getRandomValues(new Uint32Array(4)).join('-');
    this.body = {...body, logprobs: 5, stream: true, request_id: this.id};
  }

  get running() {
    return !this.endedAt;
  }

  get nEnded() {
    return this.cells.filter((cell) => cell.ended).length;
  }

  get nTokens() {
    return this.cells.reduce((sum, cell) => sum + cell.tokens.length, 0);
  }

  /** Tokens per second of all cells together. */
  get rate() {
    return (1000 * this.nTokens) / ((this.endedAt || performance.now()) - this.startedAt);
  }

  /** Reads the stream until it ends. Never throws: the cells, or the run, have what went wrong. */
  async start() {
    try {
      for await (const event of this.api.events('/generate/batch', {body: this.body, signal: this.#abort.signal})) {
        const cell = this.cells[event.index]; // none for the totals
        if (cell) this.#change(cell.index, ...(cell.read(event, performance.now()).ended ? ['state'] : []));
      }
      if (this.nEnded < this.cells.length) this.error = 'The server ended the stream early.';
    } catch (error) {
      if (!this.#abort.signal.aborted) this.error = error.message;
    }
    this.endedAt = performance.now();
    const open = this.cells.filter((cell) => !cell.ended);
    for (const cell of open) cell.state = this.error ? 'failed' : 'stopped';
    this.#change('state', ...open.map((cell) => cell.index));
  }

  stop() {
    this.#abort.abort();
  }

  /** Ends one cell: the last event of its stream says so. Throws what `request` throws. */
  async stopCell(index) {
    await this.api.request('/generate/batch/cancel', {body: {request_id: this.id, index}});
  }

  /**
   * Calls `changed` before a frame that must show something new of: the cell with this index; a cell that has ended, or
   * the end of all ('state'); anything ('run'). Returns a function that ends it.
   */
  listen(what, changed) {
    if (!this.#listeners.has(what)) this.#listeners.set(what, new Set());
    const all = this.#listeners.get(what).add(changed);
    return () => { all.delete(changed); };
  }

  #change(...all) {
    if (!this.#changed.size) {
      this.schedule(() => {
        const changed = [...this.#changed, 'run'];
        this.#changed.clear();
        for (const what of changed) this.#listeners.get(what)?.forEach((call) => call());
      });
    }
    for (const what of all) this.#changed.add(what);
  }
}

const VALUES = {mean: (cell) => cell.meanLogprob, total: (cell) => cell.totalLogprob, length: (cell) => cell.tokens.length};

/** The cells as given, or by mean, total or length, the largest value first; cells without tokens come last. */
export function ordered(cells, order) {
  if (order === 'given') return cells;
  const value = (cell) => (cell.tokens.length ? VALUES[order](cell) : -Infinity);
  return [...cells].sort((a, b) => value(b) - value(a) || a.index - b.index);
}

/** Of two or more cells that are done, the one with the highest mean log-probability. */
export function bestOf(cells) {
  const done = cells.filter((cell) => cell.state === 'done' && cell.tokens.length);
  return done.length > 1 ? ordered(done, 'mean')[0] : null;
}
