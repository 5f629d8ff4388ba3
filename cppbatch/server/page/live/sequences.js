// The running sequences of a worker, a row for each, and the queue behind them.
import {html} from '../components.js';
import {count, fixed, percent, plural, seconds} from '../format.js';
import {colourOf} from './live_layout.js';

const STATES = {prefill: '▷', decode: '●', swapped: '◫'};
const COLUMNS = ['Sequence', 'State', 'Tokens of at most', 'Tokens/s', 'Drafts accepted', 'seq_id'];
const SHOWN = 10; // of the queue

/** `places`: the number of the sequence in each row, or null; `speeds`: tokens/s by number; `picked`: numbers. */
export function Sequences({places, rows, speeds, picked, onPick}) {
  const byNumber = new Map(rows.map((row) => [row.number, row]));
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Running sequences"><table>
    <thead><tr>${COLUMNS.map((label, i) => html`<th scope="col" class=${i > 2 && 'end'}>${label}</th>`)}</tr></thead>
    <tbody>${places.map((number, place) => (number === null
      ? html`<tr key=${`free ${place}`}><td colspan="6" class="muted">free</td></tr>`
      : html`<${Row} key=${number} row=${byNumber.get(number)} colour=${colourOf(place)} speed=${speeds.get(number)}
          picked=${picked.has(number)} onPick=${onPick} />`))}</tbody>
  </table></div>
  <p class="hint"><b>▷ prefill</b>: its prompt is computed. <b>● decode</b>: each step gives it the next token.
    <b> ◫ swapped</b>: others needed its cells; it continues later.</p>`;
}

function Row({row, colour, speed, picked, onPick}) {
  const {number, state, prompt_tokens: prompt, generated_tokens: generated, drafted_tokens: drafted} = row;
  const [n, most] = [prompt + generated, prompt + row.max_tokens];
  const title = `Prompt: ${count(prompt)}, cached: ${count(row.cached_tokens)}, generated: ${count(generated)}`;
  return html`<tr data-number=${number} data-state=${state} class=${picked && 'picked'}>
    <th scope="row"><button type="button" class=${`pick ${colour}`} aria-pressed=${String(picked)}
      onClick=${() => onPick(number)}><i></i>#${number}</button></th>
    <td><span aria-hidden="true">${STATES[state]} </span>${state}${state === 'prefill'
      && ` ${percent(row.computed_tokens / n)}`}</td>
    <td title=${title}><svg class=${`bar ${colour}`} viewBox=${`0 0 ${most} 1`} preserveAspectRatio="none"
      aria-hidden="true"><path class="prompt" d=${`M0 0h${Math.min(row.computed_tokens, prompt)}v1H0z`} />
      <path d=${`M${prompt} 0h${generated}v1H${prompt}z`} /></svg>${count(n)} of ${count(most)}</td>
    <td class="end">${state === 'decode' ? fixed(speed) : '–'}</td>
    <td class="end">${drafted ? `${percent(row.accepted_tokens / drafted)} of ${count(drafted)}` : '–'}</td>
    <td class="end">${row.seq_id ?? '–'}</td>
  </tr>`;
}

/** The waiting requests, by rank. */
export const Queue = ({queue, waiting}) => (waiting ? html`
  <ol>${queue.slice(0, SHOWN).map(({number, age, prompt_tokens: prompt, priority, rank}) => html`<li key=${number}>
    <b>#${number}</b> waits ${seconds(age)}, ${plural(prompt, 'prompt token')}${priority ? `, priority ${priority}` : ''
    }${rank === null ? '' : `, rank ${fixed(rank, 2)}`}</li>`)}</ol>
  <p class="hint">${waiting > SHOWN && `and ${count(waiting - SHOWN)} more. `}The lowest rank is
    next: the priority, less a tenth of the seconds waited.</p>` : html`<p class="hint">Nobody waits.</p>`);
