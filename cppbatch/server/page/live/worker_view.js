// @ts-check
// One worker: its health, its sequences, its queue and its KV cells.
import {Badge, html, useRef, useState} from '../components.js';
import {count, plural, seconds} from '../format.js';
import {CellMap} from './cell_map.js';
import {placeRows} from './row_places.js';
import {Queue, Sequences, nameOf} from './sequences.js';

const NEWS = 60; // seconds for which a restart is told

/** A worker in a line: who it is and how it is. */
export function WorkerLine({worker, restartedAgo}) {
  const {name, pid, device, health: {status, error}, in_flight, restarts, draining, age, engine} = worker;
  const kind = {ok: 'ok', sleeping: 'ok', failed: 'error', closed: 'error'}[status] ?? 'warning';
  const news = status === 'restarting' ? `worker ${name} is restarted: its requests continue`
    : restartedAgo < NEWS && `worker ${name} restarted ${seconds(Math.round(restartedAgo))} ago: its requests continue`;
  const facts = [pid && `pid ${pid}`, device !== null && `GPU ${device}`, plural(in_flight, 'unfinished request'),
    restarts > 0 && plural(restarts, 'restart'), draining && 'drains: it gets no new requests',
    engine && in_flight > 0 && age > 1.5 && `in a step since ${seconds(age)}`, error];
  return html`<li><${Badge} kind=${kind}>${status}<//> <b>${news || `worker ${name}`}</b>
    <span class="muted"> ${facts.filter(Boolean).join(' · ')}</span></li>`;
}

/** `of`: the worker, where there are several. `speeds`: tokens/s by number. */
export function WorkerView({engine: {rows, queue, waiting, cells, n_parallel}, speeds, of}) {
  const [chosen, setChosen] = useState([]);
  const places = useRef([]);
  places.current = placeRows(places.current, rows.map(({number}) => number));
  const numberOf = new Map(rows.map(({seq_id, number}) => [seq_id, number]));
  const picked = new Set(rows.filter(({number}) => chosen.includes(number)).map(({number}) => number));
  return html`<div class="engine">
    <section aria-label=${`Batch${of}`}>
      <h2>Batch${of} <span>${rows.length} of ${plural(n_parallel, 'sequence')}</span></h2>
      <${Sequences} ...${{rows, speeds, picked}} places=${places.current}
        onPick=${(number) => setChosen(picked.size === 1 && picked.has(number) ? [] : [number])} />
      <h2>Queue <span>${count(waiting)} waiting</span></h2>
      <${Queue} queue=${queue} waiting=${waiting} />
    </section>
    <section aria-label=${`KV cells${of}`}>
      <h2>KV cells${of} <span>${cells.layout}</span></h2>
      <p class="hint">A cell holds the keys and values of one token. A row is a sequence, from its first token on. A block
        over several rows is a shared prefix: stored once, used by all of them. Select it to see by which.</p>
      <${CellMap} cells=${cells} place=${(id) => places.current.indexOf(numberOf.get(id))}
        name=${(id) => nameOf(numberOf.get(id))}
        picked=${new Set(rows.filter(({number}) => picked.has(number)).map(({seq_id}) => seq_id))}
        onPick=${(ids) => setChosen(ids.map((id) => numberOf.get(id)))} />
    </section>
  </div>`;
}
