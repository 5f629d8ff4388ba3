// One prompt, or a table of them, with many settings: all answers side by side, from one request.
import * as api from '../api.js';
import {Button, EmptyState, Notice, html, stylesheet, useEffect, useReducer, useRef, useState, useStored} from '../components.js';
import {CellGrid} from './cell_grid.js';
import {ExportDialog} from './export_dialog.js';
import {cellAlone} from './export_code.js';
import {GridRun} from './grid_run.js';
import {EMPTY_FORM, planRun} from './run_plan.js';
import {RunForm} from './run_form.js';
import {TokenDialog} from './token_dialog.js';

await stylesheet(import.meta.url, 'playground.css');

export function Playground({server}) {
  const [form, setForm] = useStored('playground', EMPTY_FORM);
  const [error, setError] = useState(null);
  const [run, setRun] = useState(null);
  const [tokensOf, setTokensOf] = useState(null);
  const [exporting, setExporting] = useState(null);
  const [, draw] = useReducer((n) => n + 1, 0);
  const results = useRef(null);
  useEffect(() => run?.listen('state', draw), [run]);

  const plan = () => {
    try {
      setError(null);
      const planned = planRun(form);
      if (server.info.models?.length > 1) planned.body.model = server.name;
      return planned;
    } catch (problem) {
      setError(problem);
      return null;
    }
  };
  const start = () => {
    const planned = plan();
    if (!planned || run?.running) return;
    const next = new GridRun(planned, api, (flush) => requestAnimationFrame(flush));
    setRun(next);
    next.start();
    if (matchMedia('(max-width: 860px)').matches) requestAnimationFrame(() => results.current.scrollIntoView());
  };
  const onKeyDown = (event) => {
    if (event.key !== 'Enter' || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    start();
  };
  const exportForm = () => {
    const planned = plan();
    if (planned) setExporting({title: `Export ${planned.labels.length} cells`, run: planned.body});
  };
  const exportCell = (cell) => setExporting({
    title: `Export: ${cell.name}`, run: cellAlone(run.asked, cell.index, cell.seed),
  });

  return html`<div class="play" onKeyDown=${onKeyDown}>
    <${RunForm} form=${form} onChange=${setForm} error=${error} server=${server} actions=${html`
      ${run?.running
        ? html`<${Button} kind="danger" icon="stop" onClick=${() => run.stop()}>Stop all<//>`
        : html`<${Button} kind="primary" icon="send" title="Ctrl+Enter" onClick=${start}
            disabled=${!server.info.model}>Run<//>`}
      <${Button} icon="copy" onClick=${exportForm}>Export<//>`} />
    <div class="results" ref=${results}>
      ${run?.error && html`<${Notice} kind="error">${run.error}<//>`}
      ${run
        ? html`<${CellGrid} key=${run.startedAt} run=${run} onTokens=${setTokensOf} onExport=${exportCell} />`
        : html`<${EmptyState} title="Many answers to one prompt">
            Enter a prompt, choose what to vary, and run it. All answers are computed in one batch, which computes
            their common prefix only once, and appear side by side.<//>`}
    </div>
    ${tokensOf && html`<${TokenDialog} cell=${tokensOf} onClose=${() => setTokensOf(null)} />`}
    ${exporting && html`<${ExportDialog} ...${exporting} server=${server} onClose=${() => setExporting(null)} />`}
  </div>`;
}
