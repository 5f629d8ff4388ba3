// The cells of a run, side by side. A cell draws itself when it has changed, at most once a frame.
import {
  Badge, Button, CopyButton, Field, Progress, html, toast, useEffect, useReducer, useRef, useState, useStored, useTurns,
} from '../components.js';
import {fixed, plural, rate} from '../format.js';
import {bestOf, ordered} from './grid_run.js';
import {wordDiff} from './word_diff.js';

const ORDERS = {
  given: 'as given', mean: 'mean log-probability', total: 'total log-probability', length: 'length',
};
const BADGES = {running: 'accent', done: 'ok', stopped: 'warning', failed: 'error'};
const REASONS = {length: ', max_tokens reached', timeout: ', out of time'};

function useDraw(run, what) {
  const [, draw] = useReducer((n) => n + 1, 0);
  useEffect(() => run.listen(what, draw), [run, what]);
}

/** onTokens(cell), onExport(cell): the reader asks for a dialog. */
export function CellGrid({run, onTokens, onExport}) {
  const [order, setOrder] = useStored('playground.order', 'given');
  const [base, setBase] = useState(null);
  const [current, setCurrent] = useState(0);
  const list = useRef(null);
  useDraw(run, 'state');
  const cells = ordered(run.cells, order);
  const best = bestOf(cells);

  const onKeyDown = (event) => {
    const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
    const next = cells[cells.findIndex(({index}) => index === current) + step];
    if (!next || !event.target.dataset.index) return;
    event.preventDefault();
    list.current.querySelector(`[data-index="${next.index}"]`).focus();
  };
  return html`<div class="results-bar row"><${RunStatus} run=${run} />
      ${base && html`<${Button} icon="close" onClick=${() => setBase(null)}>Stop comparing<//>`}
      <${Field} label="Order"><select value=${order} onChange=${(event) => setOrder(event.target.value)}>
        ${Object.entries(ORDERS).map(([name, label]) => html`<option value=${name}>${label}</option>`)}</select><//></div>
    <ol class="cells" ref=${list} onKeyDown=${onKeyDown}>${cells.map((cell) => html`<${CellView} key=${cell.index}
      run=${run} cell=${cell} base=${base} isBest=${cell === best} isCurrent=${cell.index === current}
      onFocus=${setCurrent} onCompare=${setBase} onTokens=${onTokens} onExport=${onExport} />`)}</ol>`;
}

function RunStatus({run}) {
  useDraw(run, 'run');
  const n = run.cells.length;
  const ended = `${run.nEnded} of ${plural(n, 'cell')} ended`;
  return html`<div class="run-status stack grow">
    <div><strong>${ended}</strong> <span class="muted number">${plural(run.nTokens, 'token')}, ${rate(run.rate)}</span></div>
    <${Progress} value=${run.nEnded} max=${n} label="Finished cells" />
    <div class="hidden-text" role="status">${run.running ? `${plural(n, 'cell')} running` : ended}</div></div>`;
}

function CellView({run, cell, base, isBest, isCurrent, onFocus, onCompare, onTokens, onExport}) {
  useDraw(run, cell.index);
  const {index, name, state, tokens, ended} = cell;
  const quiet = {kind: 'quiet', tabindex: isCurrent ? 0 : -1}; // the arrow keys go to the other cells, the Tab key leaves
  const stop = () => run.stopCell(index).catch((error) => toast(error.message, 'error'));
  return html`<li class=${`cell ${state}`} onfocusin=${() => onFocus(index)}>
    <header><h3 title=${name}>${name}</h3>${isBest && html`<${Badge} kind="accent">most likely<//>`}
      <${Badge} kind=${BADGES[state]}>${state}<//></header>
    <div class="cell-text" role="group" aria-label=${`Text of ${name}`} tabindex=${quiet.tabindex} data-index=${index}>
      <${CellText} cell=${cell} base=${base} ended=${ended} /></div>
    <footer><p class="small muted number">${tokens.length > 0 && `${plural(tokens.length, 'token')}, ${fixed(cell.rate)}/s, ` +
      `log-probability ${fixed(cell.meanLogprob, 2)}`}${REASONS[cell.reason]}</p>
      <div class="row">${ended ? html`
        <${Button} ...${quiet} disabled=${!tokens.length} onClick=${() => onTokens(cell)}>Tokens<//>
        <${Button} ...${quiet} aria-pressed=${cell === base}
          onClick=${() => onCompare(cell === base ? null : cell)}>Compare<//>
        <${Button} ...${quiet} onClick=${() => onExport(cell)}>Export<//>
        <${CopyButton} tabindex=${quiet.tabindex} label="Copy text" text=${() => cell.text} />`
        : html`<${Button} ...${quiet} icon="stop" onClick=${stop}>Stop<//>`}</div></footer></li>`;
}

/** The text, or its differences from that of the base, once both have ended. */
function CellText({cell, base, ended}) {
  const {hasTime, again} = useTurns();
  const diff = useRef({});
  const isCompared = base && base !== cell && ended && base.ended;
  if (isCompared && diff.current.base !== base) {
    if (hasTime()) diff.current = {base, parts: wordDiff(base.text, cell.text)};
    else again();
  }
  if (isCompared && diff.current.base === base) {
    return diff.current.parts.map(({kind, text}) => html`<${{same: 'span', added: 'ins', removed: 'del'}[kind]}>${text}<//>`);
  }
  return cell.state === 'failed' ? html`<p class="field-error">${cell.reason}</p>${cell.text}` : cell.text;
}
