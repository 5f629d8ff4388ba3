// One worker: its health, its sequences, its queue and its KV cells.
import {Badge, html, useRef, useState} from '../components.js';
import {bytes, count, fixed, percent, plural, seconds} from '../format.js';
import {CellMap} from './cell_map.js';
import {colourOf, placeRows} from './live_layout.js';

const STATES = {prefill: '▷', decode: '●', swapped: '◫'};
const COLUMNS = ['Sequence', 'State', 'Tokens of maximum', 'Tokens/s', 'Acceptance', 'seq_id'];
const SHOWN = 10; // of the queue
const NEWS = 60; // seconds for which a restart is told

/** The server counts a request from its arrival to its end; the engine has it between the tokeniser and its last token. */
function requestsText(n, engine) {
  const outside = engine ? n - engine.rows.length - engine.waiting : 0;
  return plural(n, 'unfinished request') + (outside > 0 ? ` (${count(outside)} being tokenised or finished)` : '');
}

/** A worker in a line: who it is and how it is. */
export function WorkerLine({worker, restarted}) {
  const {name, pid, device, health: {status, error}, in_flight, restarts, draining, age, engine} = worker;
  const kind = {ok: 'ok', sleeping: 'ok', failed: 'error', closed: 'error'}[status] ?? 'warning';
  const news = status === 'restarting' ? ' is restarting: its requests continue'
    : restarted < NEWS && ` restarted ${Math.round(restarted)} s ago: its requests continue`;
  const facts = [pid && `pid ${pid}`, device !== null && `GPU ${device}`, requestsText(in_flight, engine),
    restarts > 0 && plural(restarts, 'restart'), draining && 'draining: no new requests',
    in_flight > 0 && age > 1.5 && `in a step for ${seconds(age)}`, error];
  return html`<li><${Badge} kind=${kind}>${status}<//> <b>worker ${name}${news}</b>
    <span class="muted"> ${facts.filter(Boolean).join(' · ')}</span></li>`;
}

/** `of`: the worker, where there are several. */
export function WorkerView({engine: {rows, queue, waiting, cells, n_parallel}, speeds, of}) {
  const [chosen, setChosen] = useState([]);
  const places = useRef([]);
  places.current = placeRows(places.current, rows.map(({number}) => number));
  const numberOf = new Map(rows.map(({seq_id, number}) => [seq_id, number]));
  const {used, cached, free, layout} = cells;
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
      <h2>KV cells${of} <span>${count(used)} used, ${count(cached)} cached, ${count(free)} free</span></h2>
      <p class="hint">A cell holds the keys and values of one token. Each row is a sequence, from its first token on. ${
        layout === 'unified' ? 'A block across several rows is a shared prefix, stored once. Select it to see its holders.'
          : 'The layout is per-sequence: each sequence has its own cells, and a common prefix is copied.'}</p>
      ${(cells.window > 0 || cells.states) && html`<p class="hint">${describeMemory(cells)}</p>`}
      <${CellMap} cells=${cells} picked=${new Set(picked.map(({seq_id}) => seq_id))}
        name=${(id) => `#${numberOf.get(id)}`} place=${(id) => places.current.indexOf(numberOf.get(id))}
        onPick=${(ids) => setChosen(ids.map((id) => numberOf.get(id)))} />
    </section>
  </div>`;
}

/** What a sequence has beside cells of full attention. */
function describeMemory({window, states, checkpoints, checkpoint_bytes: size}) {
  const parts = [window > 0 && `a sliding window of ${plural(window, 'token')}`, states && 'recurrent states'];
  return `A sequence also has ${parts.filter(Boolean).join(' and ')}${size ? `, ${bytes(size)}` : ''}; ${
    plural(checkpoints, 'checkpoint')} in host memory.`;
}

function Sequences({places, rows, speeds, picked, onPick}) {
  const byNumber = new Map(rows.map((row) => [row.number, row]));
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Running sequences"><table>
    <thead><tr>${COLUMNS.map((label, i) => html`<th scope="col" class=${i > 2 && 'end'}>${label}</th>`)}</tr></thead>
    <tbody>${places.map((number, place) => (number === null
      ? html`<tr key=${`free ${place}`}><td colspan="6" class="muted">free</td></tr>`
      : html`<${Row} key=${number} row=${byNumber.get(number)} colour=${colourOf(place)} speed=${speeds.get(number)}
          picked=${picked.has(number)} onPick=${onPick} />`))}</tbody>
  </table></div>
  <p class="hint"><b>▷ prefill</b>: the prompt is being computed. <b>● decode</b>: each step generates the next token.
    <b> ◫ swapped</b>: its cells were needed elsewhere; it resumes later.</p>`;
}

function Row({row, colour, speed, picked, onPick}) {
  const {number, state, prompt_tokens: prompt, generated_tokens: generated, drafted_tokens: drafted} = row;
  const [n, most] = [prompt + generated, prompt + row.max_tokens];
  const title = `${count(prompt)} of the prompt (${count(row.cached_tokens)} cached), ${count(generated)} generated`;
  return html`<tr data-number=${number} data-state=${state} class=${picked && 'picked'}>
    <th scope="row"><button type="button" class="pick" style=${colour} aria-pressed=${String(picked)}
      onClick=${() => onPick(number)}><i></i>#${number}</button></th>
    <td><span aria-hidden="true">${STATES[state]} </span>${state}${state === 'prefill'
      && ` ${percent(row.computed_tokens / n)}`}</td>
    <td title=${title}><svg class="bar" style=${colour} viewBox=${`0 0 ${most} 1`} preserveAspectRatio="none"
      aria-hidden="true"><path class="prompt" d=${`M0 0h${Math.min(row.computed_tokens, prompt)}v1H0z`} />
      <path d=${`M${prompt} 0h${generated}v1H${prompt}z`} /></svg>${count(n)} of ${count(most)}</td>
    <td class="end">${state === 'decode' ? fixed(speed) : '–'}</td>
    <td class="end">${drafted ? `${percent(row.accepted_tokens / drafted)} of ${count(drafted)}` : '–'}</td>
    <td class="end">${row.seq_id ?? '–'}</td>
  </tr>`;
}

const Queue = ({queue, waiting}) => (waiting ? html`
  <ol>${queue.slice(0, SHOWN).map(({number, age, prompt_tokens: prompt, priority, rank}) => html`<li key=${number}>
    <b>#${number}</b> waits ${seconds(age)}, ${plural(prompt, 'prompt token')}${priority ? `, priority ${priority}` : ''
    }${rank === null ? '' : `, rank ${fixed(rank, 2)}`}</li>`)}</ol>
  <p class="hint">${waiting > SHOWN && `and ${count(waiting - SHOWN)} more. `}The lowest rank runs
    next: priority minus a tenth of the seconds waited, later for a client's further requests.</p>`
  : html`<p class="hint">No requests are waiting.</p>`);
