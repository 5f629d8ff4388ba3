// @ts-check
// The KV cells of a worker: how many are free, and which sequences hold the others.
import {html} from '../components.js';
import {count, plural} from '../format.js';
import {kindOf, layoutCells} from './cell_layout.js';
import {colourOf} from './row_places.js';
import {mapWidth} from './scales.js';

const HEIGHT = 384;
const MOST_ROWS = 128;

/** `place(seq_id)`: its row in the table of sequences; `name(seq_id)`: as it is called there. `picked`: a Set of
 * seq_ids, `onPick(seq_ids)`. Every block says in words what it is, for those who do not see the map. */
export function CellMap({cells, place, name, picked, onPick}) {
  const {blocks, rows} = layoutCells(cells.segments, place);
  const shown = Math.min(MOST_ROWS, Math.max(4, Math.ceil(rows / 4) * 4)); // the height changes by 4 rows at once
  const height = Math.max(3, Math.min(20, Math.floor(HEIGHT / shown)));
  const end = mapWidth(Math.max(0, ...cells.segments.map(({start, tokens}) => start + tokens)));
  return html`
    <${CellBar} ...${cells} />
    <div class="axis number" aria-hidden="true">${[0, 0.25, 0.5, 0.75, 1].map((part) =>
      html`<span>${part ? count(end * part) : 'token 0'}</span>`)}</div>
    <ul class=${`cells ${height < 13 ? 'low' : ''}`} aria-label="Segments of KV cells"
      style=${{height: `${shown * height}px`}}>
      ${blocks.filter(({row}) => row < shown).map(({segment, row, rows: high}) => html`<${Block} key=${keyOf(segment)}
        segment=${segment} place=${place} name=${name} picked=${picked} onPick=${onPick} box=${{
          left: `${(segment.start / end) * 100}%`, width: `${(segment.tokens / end) * 100}%`,
          top: `${row * height}px`, height: `${high * height}px`}} />`)}
    </ul>
    ${rows > shown && html`<p class="hint">${plural(rows - shown, 'more row')} of cached prefixes.</p>`}`;
}

/** The same for a segment that only grows. */
const keyOf = ({start, tokens, sequences, cached}) => `${start} ${cached ? `c${tokens}` : sequences.join()}`;

function Block({segment, box, place, name, picked, onPick}) {
  const {start, tokens, sequences, prefixes} = segment;
  const kind = kindOf(segment);
  const holders = sequences.length + prefixes;
  const who = [sequences.map(name).join(', '), prefixes && plural(prefixes, 'cached prefix', 'cached prefixes')];
  const text = `${plural(tokens, 'cell')}, tokens ${count(start)} to ${count(start + tokens - 1)}, ${
    holders > 1 ? `stored once, held by ${holders}` : 'held by'}: ${who.filter(Boolean).join(', ')}`;
  const label = {own: `${sequences.map(name)}: ${count(tokens)}`, cached: `cached: ${count(tokens)}`,
    shared: `${count(tokens)} shared by ${sequences.length}`}[kind];
  const isPicked = sequences.some((id) => picked.has(id));
  const colour = kind === 'own' ? colourOf(place(sequences[0])) : '';
  return html`<li style=${box}><button type="button" class=${`${kind} ${colour} ${picked.size && !isPicked ? 'dim' : ''}`}
    title=${text} aria-label=${text} aria-pressed=${String(isPicked)} disabled=${kind === 'cached'}
    tabindex=${kind === 'own' ? -1 : 0} onClick=${() => onPick(isPicked ? [] : sequences)}><span>${label}</span></button></li>`;
}

const CellBar = ({total, ...cells}) => html`<ul class="cell-bar" aria-label=${`${count(total)} KV cells`}>
  ${['used', 'cached', 'free'].map((kind) => html`<li class=${kind} style=${{flexGrow: cells[kind]}}><span>${
    count(cells[kind])} ${kind}</span></li>`)}</ul>`;
