// The Live tab: what the engine does now, from the snapshots of GET /live.
import {events} from '../api.js';
import {Button, Notice, html, stylesheet, useEffect, useMemo, useRef, useState} from '../components.js';
import {count, fixed, percent, rate, seconds} from '../format.js';
import {Chart} from './chart.js';
import {follow, whileVisible} from './follow.js';
import {LiveHistory, PHASES} from './live_history.js';
import {NothingRuns} from './sample_requests.js';
import {WorkerLine, WorkerView} from './worker_view.js';

await stylesheet(import.meta.url, 'live.css');

const IDLE = 3; // seconds after the last request
const MANY = 32; // unfinished requests from which on every second snapshot is shown
const TICK = 1; // seconds
const SILENCE = {busy: 5, idle: 20}; // seconds: a snapshot comes 5 times a second, and of an idle server a comment every 15

const CHARTS = [
  {title: 'Generated tokens', colour: 0, format: rate, series: [['generated', 'generated']]},
  {title: 'Prompt tokens', colour: 1, format: rate, series: [['computed', 'prompt']]},
  {title: 'Batch size', colour: 2, format: fixed, series: [['sequences in decode', 'batch']]},
  {title: 'Step time', colour: 0, format: seconds, areas: true, series: PHASES.map((name) => [name, name])},
  {title: 'Time to first token', colour: 3, format: seconds, series: [['median', 'ttft'], ['p95', 'ttft95']]},
  {title: 'Time between tokens', colour: 5, format: seconds, series: [['median', 'itl'], ['p95', 'itl95']]},
  {title: 'Draft tokens', colour: 7, format: percent, series: [['accepted', 'acceptance']]},
];

export function Live({server, active}) {
  const history = useRef(new LiveHistory()).current;
  const [connection, setConnection] = useState({});
  const [view, setView] = useState(null);
  const [paused, setPaused] = useState(false);
  const isPaused = useRef(false);
  isPaused.current = paused;

  useEffect(() => active && whileVisible((signal) => {
    let last = null;
    let receivedAt = 0;
    let n = 0;
    let load = 0;
    const receive = (snapshot) => {
      [last, receivedAt] = [snapshot, performance.now()];
      history.add(snapshot);
      load = snapshot.workers.reduce((sum, {in_flight}) => sum + in_flight, 0);
      if (!isPaused.current && (load <= MANY || (n += 1) % 2)) setView(history.view());
    };
    follow({
      open: (inner, alive) => events('/live', {signal: inner, onAlive: alive}),
      silence: () => (load ? SILENCE.busy : SILENCE.idle),
      onEvent: receive,
      onState(state) {
        if (state.message) last = null;
        setConnection((before) => (before.message || state.message ? state : before));
      },
    }, signal);
    const clock = setInterval(() => { // the server sends nothing while nothing changes
      if (last && !load && performance.now() - receivedAt > TICK * 1000) receive({...last, time: last.time + TICK});
    }, TICK * 1000);
    signal.addEventListener('abort', () => clearInterval(clock));
  }), [active]);

  const {message, pause} = connection;
  const problem = message && html`<${Notice} kind="error">${pause ? html`<b>Lost the server.</b> ${
    `${message} Retrying in ${seconds(pause)}. Showing the last known state.`}` : `GET /live: ${message}`}<//>`;
  if (!view) return html`<div class="live-page">${problem}</div>`;
  const {snapshot: {workers, batches}, samples, idle} = view;
  return html`<div class=${`live-page ${problem && 'gone'}`}>
    ${problem}
    <div class="row">
      <${Figures} ...${{workers, batches, last: samples[samples.length - 1]}} />
      <${Button} aria-pressed=${String(paused)} onClick=${() => setPaused(!paused)}>Pause<//>
    </div>
    <ul aria-label="Workers">${workers.map((worker, i) => html`<${WorkerLine} worker=${worker}
      restarted=${view.restarted[i]} />`)}</ul>
    ${idle > IDLE && html`<${NothingRuns} ...${server} />`}
    ${workers.map(({name, engine}, i) => engine && html`<${WorkerView} key=${name} engine=${engine}
      speeds=${view.speeds[i]} of=${workers.length > 1 ? ` of worker ${name}` : ''} />`)}
    <${Charts} samples=${samples} />
  </div>`;
}

function Charts({samples}) {
  const [ago, setAgo] = useState(null);
  return useMemo(() => html`<section aria-label="Charts"><h2>The last two minutes</h2><div class="charts">${
    CHARTS.map((chart) => html`<${Chart} ...${chart} samples=${samples} ago=${ago} onAgo=${setAgo} />`)}
  </div></section>`, [samples, ago]);
}

const IDEAL = 'Of the last minute: the time that its tokens need at least on this machine, as a share of the time they took';
const mean = (values) => values.reduce((total, each) => total + each, 0) / values.length;

function Figures({workers, batches, last}) {
  const engines = workers.flatMap(({engine}) => engine ?? []);
  const sum = (of) => engines.reduce((total, engine) => total + of(engine), 0);
  const isIdle = !sum(({rows, waiting}) => rows.length + waiting);
  return html`<dl>${[
    ['running', `${sum(({rows}) => rows.length)} of ${sum(({n_parallel}) => n_parallel)}`],
    ['waiting', count(sum(({waiting}) => waiting))],
    ['generated', rate(last.generated)],
    ['of ideal speed', isIdle ? '–' : percent(mean(engines.flatMap(({of_ideal}) => of_ideal ?? []))), IDEAL],
    ['KV cells used', percent(sum(({cells}) => cells.used) / sum(({cells}) => cells.total))],
    ...batches.map(({completed, total}) => ['lines of a job', `${count(completed)} of ${count(total)}`]),
  ].map(([name, value, title]) => html`<div title=${title}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}
