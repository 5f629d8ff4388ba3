// The last two minutes of snapshots, as samples for the charts. No DOM.

export const SECONDS = 120;
const MEAN = 1; // seconds over which rates are averaged: a step may be longer than the time between two snapshots
const APART = 0.9; // seconds between two samples

export const PHASES = ['decode', 'sample', 'schedule', 'fill', 'advance', 'text', 'emit'];

export class LiveHistory {
  constructor() {
    this.samples = []; // oldest first, as `sample` makes them; one with only a time is a gap
    this.snapshots = []; // of the last second, as the intervals
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
    if (time - last > 3) this.samples.push({time: last + APART}); // a gap
    this.samples = [...this.samples.filter((each) => each.time >= time - SECONDS), this.sample(snapshot)];
  }

  sample({time, first_token_seconds: ttft, inter_token_seconds: itl}) {
    const sum = (of) => this.intervals.reduce((total, each) => total + of(each), 0);
    const mean = (name) => this.snapshots.reduce((total, each) => total + each[name], 0) / this.snapshots.length;
    const steps = sum((each) => each.steps);
    return {
      time, generated: mean('tokens_per_second'), prompt: mean('prompt_tokens_per_second'),
      ttft: ttft.p50, ttft95: ttft.p95, itl: itl.p50, itl95: itl.p95,
      batch: steps ? sum((each) => each.batch_size * each.steps) / steps : 0,
      acceptance: sum((each) => each.accepted_tokens) / sum((each) => each.drafted_tokens),
      ...Object.fromEntries(PHASES.map((name) => [name, steps ? sum((each) => each.phases[name]) / steps : NaN])),
    };
  }

  /** What the tab shows. `idle`: seconds since the last request. For each worker: `restarted`, seconds since a restart
   * was seen, or NaN; `speeds`, tokens/s of its sequences by number. */
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
    const before = this.snapshots[0].workers.find((each) => each.name === name && each.pid === pid)?.engine;
    const tokens = new Map(before?.rows.map((row) => [row.number, row.generated_tokens]));
    return new Map(engine?.rows.map(({number, generated_tokens}) =>
      [number, (generated_tokens - tokens.get(number)) / (engine.clock - before?.clock)]));
  }
}
