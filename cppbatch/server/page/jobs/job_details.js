// A job: progress, settings, failures and results as they come, downloads.
import {open, request} from '../api.js';
import {
  Button, Menu, Notice, Table, confirmAction, download, html, toast, useEffect, useRef, useState,
} from '../components.js';
import {count, dateTime, plural, rate as perSecond} from '../format.js';
import {JobProgress, State, isOpen, nameOf, stateOf} from './job_parts.js';
import {textOf} from './requests.js';
import {eachLine, inputOf, joinCsv, resultOf} from './results.js';

const SHOWN = 50;
const MAX_KEPT = 10_000;
const MAX_READ = 1 << 20; // bytes of results that are read at once: of more, only the last ones are shown
const MAX_INPUT = 1 << 25; // bytes of an input whose columns are shown
const MAX_TEXT = 400;

const blobOf = async ([id, size]) => (id && size !== 0 ? (await open(`/v1/files/${id}/content`)).blob() : new Blob());
const sizeOf = async (id) => (await request(`/v1/files/${id}`)).bytes;

/** The ids and sizes of the output and of the errors. A size that only the server knows is undefined. */
function filesOf(job) {
  const now = job.results_so_far;
  return now ? [[now.output_file_id, now.output_bytes], [now.error_file_id, now.error_bytes]]
    : [[job.output_file_id], [job.error_file_id]];
}

/** The results in a file that may grow, the newest last, and the error of the last reading. */
function useResults([id, size]) {
  const [state, setState] = useState({results: [], error: null});
  const at = useRef(0);
  const last = useRef(Promise.resolve());
  useEffect(() => {
    const read = async () => {
      const end = size ?? await sizeOf(id);
      if (end <= at.current) return;
      const start = Math.max(at.current, end - MAX_READ);
      const headers = {Range: `bytes=${start}-${end - 1}`};
      let blob = await (await open(`/v1/files/${id}/content`, {headers})).blob();
      if (start > at.current) blob = blob.slice((await blob.text()).indexOf('\n') + 1);
      const found = [];
      await eachLine(blob, resultOf, (result) => found.push(result));
      at.current = end;
      setState(({results}) => ({results: [...results, ...found].slice(-MAX_KEPT), error: null}));
    };
    if (!id || size === 0) return;
    last.current = last.current.then(read).catch((error) => setState(({results}) => ({results, error})));
  }, [id, size]);
  return state;
}

/** The columns of the input by the names of its lines; none if it is too large, or deleted. */
function useInput(id) {
  const [rows, setRows] = useState(new Map());
  useEffect(() => {
    const read = async () => {
      if (await sizeOf(id) > MAX_INPUT) return;
      const found = new Map();
      await eachLine(await blobOf([id]), inputOf, (line) => found.set(line.id, line.row));
      setRows(found);
    };
    read().catch(() => {});
  }, [id]);
  return rows;
}

const text = (value) =>
  html`<p class="text">${textOf(value).slice(0, MAX_TEXT)}${textOf(value)[MAX_TEXT] && ' …'}</p>`;
const linesText = (lines) =>
  lines.slice(0, 8).join(', ') + (lines.length > 8 ? ` and ${count(lines.length - 8)} more` : '');

/** errors: those of the batch itself, for one that has no file of errors. */
function Failures({results, errors}) {
  const groups = new Map();
  const found = results.length ? results : errors.map(({message, line}) => ({error: message, line}));
  for (const {error, line, id} of found) groups.set(error, [...(groups.get(error) ?? []), line ?? id]);
  const rows = [...groups].sort(([, a], [, b]) => b.length - a.length).slice(0, SHOWN);
  return rows.length > 0 && html`<h2>Failures</h2><${Table} caption="Failures by reason" rows=${rows} columns=${[
    {label: 'Reason', render: ([reason]) => text(reason)},
    {label: 'Lines', render: ([, lines]) => linesText(lines)},
  ]} />`;
}

function Results({results, rows}) {
  const [shown, setShown] = useState(SHOWN);
  const columns = Object.keys(rows.get(results.at(-1)?.id) ?? {}).slice(0, 3);
  const areFiles = `${columns}` === 'file'; // which are named by it
  const names = areFiles ? [] : columns;
  return results.length > 0 && html`<h2>Results, newest first</h2>
    <${Table} caption="Results" rows=${results.slice(-shown).reverse()} rowKey=${(row) => row.id} columns=${[
    {label: areFiles ? 'File' : 'Line', render: (row) => text(row.id)},
    ...names.map((name) => ({label: name.slice(0, 40), render: (row) => text(rows.get(row.id)?.[name])})),
    {label: 'Answer', render: (row) => text(row.answer)},
    {label: 'Tokens', align: 'end', render: (row) => count(row.completion_tokens)},
  ]} />
    ${results.length > shown && html`<div><${Button} onClick=${() => setShown(shown + SHOWN)}>Show more<//></div>`}`;
}

/** The settings of a job, by their names: what it was started with, as JSON. */
function settingsOf({settings, ...others}) {
  try {
    const {guided_choice: choices, json_schema: schema, ...sampling} = JSON.parse(settings ?? '{}');
    const columns = schema?.properties && {answer_columns: Object.keys(schema.properties).join(', ')};
    const answer = choices ? {allowed_answers: choices.join(', ')} : columns ?? (schema && {json_schema: schema});
    return {...others, ...sampling, ...answer};
  } catch {
    return {...others, settings}; // cut off by the limit of metadata, or of another program
  }
}

function Facts({job: {created_at, model, endpoint, usage, metadata, status}, rate}) {
  const facts = {
    created: dateTime(created_at),
    model,
    endpoint,
    speed: status === 'in_progress' && rate?.value > 0 && perSecond(rate.value, 'lines/s'),
    'prompt tokens': `${count(usage.input_tokens)}, ${count(usage.input_tokens_details.cached_tokens)} cached`,
    'answer tokens': count(usage.output_tokens),
    ...settingsOf(metadata ?? {}),
  };
  return html`<dl class="fields facts">${Object.entries(facts).map(([term, value]) => (value || value === 0)
    && html`<div><dt>${term.replaceAll('_', ' ')}</dt><dd>${textOf(value)}</dd></div>`)}</dl>`;
}

/** onChange: called when the job was changed here. */
export function JobDetails({job, rate, server, onChange}) {
  const files = filesOf(job);
  const [output, failures] = files.map(useResults);
  const rows = useInput(job.input_file_id);
  const stays = isOpen(job);
  const problem = output.error ?? failures.error;

  const run = (action) => () => action().catch((error) => toast(error.message, 'error'));
  const save = (name, make) =>
    run(async () => download(`${nameOf(job).replace(/\.[^.]*$/, '')}-${name}`, await make()));
  const cancel = run(async () => {
    const message = `The results of ${plural(job.request_counts.completed, 'finished line')} are kept. `
      + 'The other lines will not be answered.';
    const question = {title: 'Cancel this job?', message, action: 'Cancel job', keep: 'Keep it running'};
    if (!await confirmAction(question)) return;
    await request(`/v1/batches/${job.id}/cancel`, {method: 'POST'});
    onChange();
  });
  const remove = run(async () => {
    const message = 'The input, results and failures of this job will be deleted from the server.';
    if (!await confirmAction({title: 'Delete the files?', message})) return;
    for (const id of [job.input_file_id, job.output_file_id, job.error_file_id].filter(Boolean)) {
      await request(`/v1/files/${id}`, {method: 'DELETE'}).catch((error) => { if (error.status !== 404) throw error; });
    }
    location.hash = 'jobs';
  });
  const table = async () => joinCsv(...await Promise.all([[job.input_file_id], ...files].map(blobOf)));
  const none = ({results}) => !results.length;
  const downloads = [
    {label: 'Table with answers (CSV)', onSelect: save('answers.csv', table)},
    {label: 'Results (JSONL)', onSelect: save('results.jsonl', () => blobOf(files[0])), disabled: none(output)},
    {label: 'Failures (JSONL)', onSelect: save('failures.jsonl', () => blobOf(files[1])), disabled: none(failures)},
  ];
  return html`<div class="row"><h1 class="grow name">${nameOf(job)}</h1><${State} job=${job} />
      <${Menu} label="Download" icon="download" kind="" items=${downloads}>Download<//>
      ${stays ? html`<${Button} kind="danger" icon="stop" disabled=${job.status === 'cancelling'}
        onClick=${cancel}>Cancel job<//>`
      : html`<${Button} kind="danger" icon="trash" onClick=${remove}>Delete files<//>`}</div>
    <${JobProgress} job=${job} rate=${rate} />
    <div class="hidden-text" role="status">${stateOf(job)}</div>
    ${stays && server.info.models?.length === 1 && server.name !== job.model && html`<${Notice} kind="warning">This job
      is waiting for the model ${job.model}. The server runs ${server.name}.<//>`}
    ${stays && server.health.status === 'restarting' && html`<${Notice} kind="warning">A worker is restarting. The job
      continues automatically, and no line is lost.<//>`}
    ${problem && html`<${Notice} kind="warning">${problem.status === 404 ? 'The files of this job have been deleted.'
      : problem.message}<//>`}
    <${Facts} job=${job} rate=${rate} />
    <${Failures} results=${failures.results} errors=${job.errors?.data ?? []} />
    <${Results} results=${output.results} rows=${rows} />`;
}
