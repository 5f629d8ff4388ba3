// @ts-check
// The Live tab: what the engine does now, from the snapshots of GET /live.
import {events} from '../api.js';
import {Button, Notice, html, stylesheet, useEffect, useRef, useState} from '../components.js';
import {count, fixed, percent, plural, rate, seconds} from '../format.js';
import {Chart} from './chart.js';
import {follow} from './follow.js';
import {BESIDE, LiveHistory, PHASES} from './live_history.js';
import {NothingRuns, SampleButton} from './sample_requests.js';
import {WorkerLine, WorkerView} from './worker_view.js';

await stylesheet(import.meta.url, 'live.css');

const IDLE = 3; // seconds without a request after which nothing runs
const TICK = 1000; // ms

const line = (label, of, colour) => ({label, of, colour});
const CHARTS = [
  {title: 'Generated tokens', format: rate, series: [line('generated', 'generated', 1)]},
  {title: 'Prompt tokens', format: rate, series: [line('computed', 'prompt', 2)]},
  {title: 'Batch size', format: fixed, series: [line('sequences in decode', 'batch', 3)]},
  {title: 'Time of a step', areas: true, format: (ms) => seconds(ms / 1000), series: [
    ...PHASES.map((name, i) => line(name, name, i + 1)),
    ...BESIDE.map((name) => ({label: `${name} (beside the next step)`, of: name, beside: true}))]},
  {title: 'Time to first token', format: seconds, series: [line('median', 'ttft', 4), line('95%', 'ttft95', 5)]},
  {title: 'Time between tokens', format: seconds, series: [line('median', 'itl', 6), line('95%', 'itl95', 7)]},
  {title: 'Draft tokens accepted', format: percent, series: [line('accepted', 'acceptance', 8)]},
];

export function Live({server, active}) {
  const history = useRef(new LiveHistory()).current;
  const [connection, setConnection] = useState({name: 'connecting'});
  const [view, setView] = useState(null);
  const [paused, setPaused] = useState(false);
  const [ago, setAgo] = useState(null);
  const isPaused = useRef(false);
  isPaused.current = paused;

  useEffect(() => active && whileVisible((signal) => {
    let last = null;
    let receivedAt = 0;
    const receive = (snapshot) => {
      [last, receivedAt] = [snapshot, performance.now()];
      history.add(snapshot);
      if (!isPaused.current) setView(history.view());
    };
    const open = (inner) => events('/live', {signal: inner});
    follow(open, signal, receive, (state) => {
      if (state.name !== 'open') last = null;
      setConnection((before) => (before.name === 'open' && state.name === 'open' ? before : state));
    });
    const clock = setInterval(() => { // the server sends nothing while nothing changes
      if (last && performance.now() - receivedAt > TICK) receive({...last, time: last.time + TICK / 1000});
    }, TICK);
    signal.addEventListener('abort', () => clearInterval(clock));
  }), [active]);

  if (!view) return html`<div class="live-page"><${Connection} ...${connection} /></div>`;
  const {snapshot: {workers, batches}, samples, speeds, idle} = view;
  return html`<div class=${`live-page ${connection.name}`}>
    <${Connection} ...${connection} />
    <div class="row">
      <${Figures} ...${{workers, batches, last: samples[samples.length - 1]}} />
      <${Button} aria-pressed=${String(paused)} onClick=${() => setPaused(!paused)}>Pause<//>
      ${idle <= IDLE && html`<${SampleButton} />`}
    </div>
    <ul class="workers" aria-label="Workers">${workers.map((worker, i) => html`<${WorkerLine} key=${worker.name}
      worker=${worker} restartedAgo=${view.restarted[i]} />`)}</ul>
    ${idle > IDLE && html`<${NothingRuns} keyed=${server.keyed} />`}
    ${workers.map(({name, engine}, i) => engine && html`<${WorkerView} key=${name} engine=${engine} speeds=${speeds[i]}
      of=${workers.length > 1 ? ` of worker ${name}` : ''} />`)}
    <section aria-label="Charts"><h2>The last two minutes</h2>
      <div class="charts">${CHARTS.map((chart) => html`<${Chart} key=${chart.title} ...${chart} samples=${samples}
        ago=${ago} onAgo=${setAgo} />`)}</div></section>
  </div>`;
}

/** Runs `start(signal)` while the page can be seen. Returns the function that ends it. */
function whileVisible(start) {
  let controller = null;
  const update = () => {
    controller?.abort();
    if (!document.hidden) start((controller = new AbortController()).signal);
  };
  update();
  document.addEventListener('visibilitychange', update);
  return () => {
    document.removeEventListener('visibilitychange', update);
    controller.abort();
  };
}

function Connection({name, message, pause}) {
  if (name === 'connecting') return html`<p class="hint" role="status">Connecting …</p>`;
  if (name === 'refused') return html`<${Notice} kind="error">GET /live: ${message}<//>`;
  return name === 'gone' && html`<${Notice} kind="error"><b>The server is gone.</b> ${message} What is below is what was last
    seen. Next try in ${seconds(pause)}.<//>`;
}

function Figures({workers, batches, last}) {
  const engines = workers.flatMap(({engine}) => engine ?? []);
  const sum = (of) => engines.reduce((total, engine) => total + of(engine), 0);
  const figures = [
    ['running', `${sum(({rows}) => rows.length)} of ${sum(({n_parallel}) => n_parallel)}`],
    ['waiting', count(sum(({waiting}) => waiting))],
    ['generated', rate(last.generated)],
    ['KV cells used', percent(sum(({cells}) => cells.used) / sum(({cells}) => cells.total))],
    ['to the first token', seconds(last.ttft)],
    ...batches.map(({completed, total}) => [html`<a href="#jobs">job</a>`, `${count(completed)} of ${plural(total, 'line')}`]),
  ];
  return html`<dl class="grow">${figures.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}
