// The KV cells of a worker: how many are free, and which sequences hold the others.
import {html} from '../components.js';
import {count, plural} from '../format.js';
import {colourOf, layoutCells} from './live_layout.js';

const HEIGHT = 384; // pixels
const CACHED = 16; // rows

/** `place(seq_id)`: its row in the table of sequences; `name(seq_id)`: its name there; `picked`: a Set of seq_ids. */
export function CellMap({cells, ...props}) {
  const {blocks, rows, held} = layoutCells(cells.segments, props.place);
  const wanted = Math.max(4, Math.ceil(Math.min(rows, held + CACHED) / 4) * 4); // changes by 4 rows at once
  const height = Math.max(3, Math.min(20, Math.floor(HEIGHT / wanted)));
  const shown = Math.max(wanted, Math.min(rows, Math.floor(HEIGHT / height)));
  const most = Math.max(64, ...cells.segments.map(({start, tokens}) => start + tokens));
  const step = 2 ** Math.floor(Math.log2(most) - 1);
  const end = Math.ceil(most / step) * step; // 64, 96, 128, 192, 256 ...: it seldom changes
  const boxOf = ({segment, row, rows: high}) => ({left: `${(segment.start / end) * 100}%`,
    width: `${(segment.tokens / end) * 100}%`, top: `${row * height}px`, height: `${high * height}px`});
  return html`
    <div class="cell-bar" aria-hidden="true">${['used', 'cached', 'free'].map((kind) => html`
      <div class=${kind} style=${{flexGrow: cells[kind]}}><span>${count(cells[kind])} ${kind}</span></div>`)}</div>
    <div class="axis" aria-hidden="true">${[0, 0.25, 0.5, 0.75, 1].map((part) =>
      html`<span>${part ? count(end * part) : 'token 0'}</span>`)}</div>
    <ul class="cells" aria-label="Segments of KV cells" style=${{height: `${shown * height}px`}}>${blocks.map((block) =>
      block.row < shown && html`<${Block} key=${keyOf(block)} ...${block} box=${boxOf(block)} ...${props} />`)}</ul>
    ${rows > shown && html`<p class="hint">and ${plural(rows - shown, 'row')} more with cached prefixes</p>`}`;
}

/** The same for a segment while it grows. */
const keyOf = ({segment: {start, sequences}, kind, row}) => `${start} ${kind === 'cached' ? `c${row}` : sequences}`;

function Block({segment: {start, tokens, sequences, prefixes}, kind, box, place, name, picked, onPick}) {
  const n = sequences.length + prefixes;
  const holders = [...sequences.map(name), ...(prefixes ? [plural(prefixes, 'cached prefix', 'cached prefixes')] : [])];
  const text = `${plural(tokens, 'cell')}, tokens ${count(start)} to ${count(start + tokens - 1)}, ${
    n > 1 ? `stored once, held by ${n}` : 'held by'}: ${holders.join(', ')}`;
  const label = {own: `${sequences.map(name)}: ${count(tokens)}`, cached: `cached: ${count(tokens)}`,
    shared: `${count(tokens)} shared by ${sequences.length}`}[kind];
  const isPicked = sequences.some((id) => picked.has(id));
  return html`<li style=${box}><button type="button" title=${text} aria-pressed=${String(isPicked)}
    class=${`${kind} ${picked.size && !isPicked && 'dim'}`} style=${kind === 'own' && colourOf(place(sequences[0]))}
    disabled=${kind === 'cached'} tabindex=${kind === 'own' ? -1 : 0}
    onClick=${() => onPick(isPicked ? [] : sequences)}><span>${label}</span></button></li>`;
}
