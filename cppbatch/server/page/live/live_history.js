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
    /** @type {any[]} Oldest first: {time, generated, prompt, ttft, ttft95, itl, itl95, batch, acceptance, ...phases};
     * times in seconds, phases in ms a step. A sample with only `time`: nothing is known of then. */
    this.samples = [];
    this.snapshots = [];
    this.intervals = [];
    this.workers = new Map();
  }

  /** Adds a snapshot of GET /live. */
  add(snapshot) {
    const {time} = snapshot;
    const isRecent = (each) => each.time > time - MEAN;
    this.snapshots = [...this.snapshots.filter(isRecent), snapshot];
    this.intervals = this.intervals.filter(isRecent);
    for (const {name, engine, interval, restarts} of snapshot.workers) {
      const before = this.workers.get(name) ?? {restarts};
      const clock = engine?.clock;
      if (interval && clock !== before.clock) this.intervals.push({...interval, time});
      this.workers.set(name, {restarts, clock, restarted: restarts > before.restarts ? time : before.restarted});
    }
    const last = this.samples[this.samples.length - 1]?.time ?? -Infinity;
    if (time - last < APART) return;
    if (time - last > GAP && last > 0) this.samples.push({time: last + APART});
    this.samples = [...this.samples.filter((each) => each.time >= time - SECONDS), this.sample(snapshot)];
  }

  sample({time, first_token_seconds: ttft, inter_token_seconds: itl}) {
    const sum = (of) => this.intervals.reduce((total, each) => total + of(each), 0);
    const mean = (name) => this.snapshots.reduce((total, each) => total + each[name], 0) / this.snapshots.length;
    const [steps, drafted] = [sum((each) => each.steps), sum((each) => each.drafted_tokens)];
    const phases = [...PHASES, ...BESIDE].map((name) =>
      [name, steps ? (sum((each) => each.phases[name] ?? 0) / steps) * 1000 : null]);
    return {
      time, generated: mean('tokens_per_second'), prompt: mean('prompt_tokens_per_second'),
      ttft: ttft.p50, ttft95: ttft.p95, itl: itl.p50, itl95: itl.p95,
      batch: steps ? sum((each) => each.batch_size * each.steps) / steps : 0,
      acceptance: drafted ? sum((each) => each.accepted_tokens) / drafted : null,
      ...Object.fromEntries(phases),
    };
  }

  /** Generated tokens/s of each running sequence of a worker, by number, over the last second. */
  speeds(name) {
    const speeds = new Map();
    const states = this.snapshots.map(({workers}) => workers.find((each) => each.name === name));
    const now = states.pop();
    const oldest = new Map();
    for (const {pid, engine} of states.filter((state) => state?.engine).reverse()) {
      if (pid === now.pid) for (const row of engine.rows) oldest.set(row.number, [row.generated_tokens, engine.clock]);
    }
    for (const {number, generated_tokens: generated} of now?.engine?.rows ?? []) {
      const [before, clock] = oldest.get(number) ?? [0, Infinity];
      if (clock < now.engine.clock) speeds.set(number, (generated - before) / (now.engine.clock - clock));
    }
    return speeds;
  }

  /** Seconds since a restart of a worker was seen, or null. */
  restartedAgo(name) {
    const at = this.workers.get(name)?.restarted;
    return at ? this.snapshots[this.snapshots.length - 1].time - at : null;
  }
}
