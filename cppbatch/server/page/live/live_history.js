// @ts-check
// The last two minutes of snapshots, as the samples that the charts show. No DOM.

export const SECONDS = 120;
const MEAN = 1; // seconds over which rates are averaged: a step may take longer than the time between two snapshots
const APART = 0.38; // seconds between two samples
const GAP = 3; // seconds without a snapshot: the lines break

/** The phases that follow each other in a step; `text` and `emit` run beside the next one. */
export const PHASES = ['decode', 'sample', 'schedule', 'fill', 'advance'];
export const BESIDE = ['text', 'emit'];

export class LiveHistory {
  constructor() {
    /** Oldest first: {time, generated, prompt, ttft, ttft95, itl, itl95, batch, acceptance, ...phases}, in seconds, and
     * ms a step for the phases. Only {time}: nothing is known of then. @type {any[]} */
    this.samples = [];
    this.snapshots = [];
    this.intervals = [];
    this.workers = new Map();
    this.busyAt = 0;
  }

  /** Adds a snapshot of GET /live. */
  add(snapshot) {
    const {time, workers} = snapshot;
    const isRecent = (each) => each.time > time - MEAN;
    if (workers.some(({in_flight}) => in_flight)) this.busyAt = time;
    this.snapshots = [...this.snapshots.filter(isRecent), snapshot];
    this.intervals = this.intervals.filter(isRecent);
    for (const {name, engine, interval, restarts} of workers) {
      const before = this.workers.get(name) ?? {restarts};
      const clock = engine?.clock;
      if (interval && clock !== before.clock) this.intervals.push({...interval, time});
      this.workers.set(name, {restarts, clock, restarted: restarts > before.restarts ? time : before.restarted});
    }
    const last = this.samples[this.samples.length - 1]?.time;
    if (time - last < APART) return;
    if (time - last > GAP) this.samples.push({time: last + APART});
    this.samples = [...this.samples.filter((each) => each.time >= time - SECONDS), this.sample(snapshot)];
  }

  sample({time, first_token_seconds: ttft, inter_token_seconds: itl}) {
    const sum = (of) => this.intervals.reduce((total, each) => total + of(each), 0);
    const mean = (name) => this.snapshots.reduce((total, each) => total + each[name], 0) / this.snapshots.length;
    const steps = sum((each) => each.steps);
    const phases = [...PHASES, ...BESIDE].map((name) => [name, (sum((each) => each.phases[name]) / steps) * 1000]);
    return {
      time, generated: mean('tokens_per_second'), prompt: mean('prompt_tokens_per_second'),
      ttft: ttft.p50, ttft95: ttft.p95, itl: itl.p50, itl95: itl.p95,
      batch: steps ? sum((each) => each.batch_size * each.steps) / steps : 0,
      acceptance: sum((each) => each.accepted_tokens) / sum((each) => each.drafted_tokens),
      ...Object.fromEntries(phases),
    };
  }

  /** What the tab shows. `idle`: seconds since the last request. For each worker: `restarted`, the seconds since its
   * restart was seen, or NaN; `speeds`, the generated tokens/s of its sequences by number, over the last second. */
  view() {
    const snapshot = this.snapshots[this.snapshots.length - 1];
    const {time, workers} = snapshot;
    return {
      snapshot, samples: this.samples, idle: time - this.busyAt,
      restarted: workers.map(({name}) => time - this.workers.get(name).restarted),
      speeds: workers.map((worker) => this.speeds(worker)),
    };
  }

  speeds({name, pid, engine}) {
    const oldest = new Map();
    for (const {workers} of [...this.snapshots].reverse()) {
      const before = workers.find((each) => each.name === name && each.pid === pid)?.engine;
      for (const {number, generated_tokens} of before?.rows ?? []) oldest.set(number, [generated_tokens, before.clock]);
    }
    return new Map((engine?.rows ?? []).map(({number, generated_tokens}) => {
      const [tokens, clock] = oldest.get(number);
      return [number, (generated_tokens - tokens) / (engine.clock - clock)];
    }));
  }
}
