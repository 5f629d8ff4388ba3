// One worker: its health, its sequences, its queue and its KV cells.
import {Badge, html, useRef, useState} from '../components.js';
import {count, plural, seconds} from '../format.js';
import {CellMap} from './cell_map.js';
import {placeRows} from './live_layout.js';
import {Queue, Sequences} from './sequences.js';

const NEWS = 60; // seconds for which a restart is told

/** A worker in a line: who it is and how it is. */
export function WorkerLine({worker, restarted}) {
  const {name, pid, device, health: {status, error}, in_flight, restarts, draining, age} = worker;
  const kind = {ok: 'ok', sleeping: 'ok', failed: 'error', closed: 'error'}[status] ?? 'warning';
  const news = status === 'restarting' ? ' is restarted: its requests continue'
    : restarted < NEWS && ` restarted ${Math.round(restarted)} s ago: its requests continue`;
  const facts = [pid && `pid ${pid}`, device !== null && `GPU ${device}`, plural(in_flight, 'unfinished request'),
    restarts > 0 && plural(restarts, 'restart'), draining && 'drains: it gets no new requests',
    in_flight > 0 && age > 1.5 && `in a step since ${seconds(age)}`, error];
  return html`<li><${Badge} kind=${kind}>${status}<//> <b>worker ${name}${news}</b>
    <span class="muted"> ${facts.filter(Boolean).join(' · ')}</span></li>`;
}

/** `of`: the worker, where there are several. */
export function WorkerView({engine: {rows, queue, waiting, cells, n_parallel}, speeds, of}) {
  const [chosen, setChosen] = useState([]);
  const places = useRef([]);
  places.current = placeRows(places.current, rows.map(({number}) => number));
  const numberOf = new Map(rows.map(({seq_id, number}) => [seq_id, number]));
  const picked = rows.filter(({number}) => chosen.includes(number));
  return html`<div class="engine">
    <section aria-label=${`Batch${of}`}>
      <h2>Batch${of} <span>${rows.length} of ${plural(n_parallel, 'sequence')}</span></h2>
      <${Sequences} rows=${rows} places=${places.current} speeds=${speeds}
        picked=${new Set(picked.map(({number}) => number))}
        onPick=${(number) => setChosen(picked.length === 1 && picked[0].number === number ? [] : [number])} />
      <h2>Queue <span>${count(waiting)} waiting</span></h2>
      <${Queue} queue=${queue} waiting=${waiting} />
    </section>
    <section aria-label=${`KV cells${of}`}>
      <h2>KV cells${of} <span>${cells.layout}</span></h2>
      <p class="hint">A cell holds the keys and values of one token. A row is a sequence, from its first token on.
        A block over several rows is a shared prefix: stored once, used by all of them. Select it to see by which.</p>
      <${CellMap} cells=${cells} picked=${new Set(picked.map(({seq_id}) => seq_id))}
        name=${(id) => `#${numberOf.get(id)}`} place=${(id) => places.current.indexOf(numberOf.get(id))}
        onPick=${(ids) => setChosen(ids.map((id) => numberOf.get(id)))} />
    </section>
  </div>`;
}
