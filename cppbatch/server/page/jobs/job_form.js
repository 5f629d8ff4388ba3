// A new job: a file or a pasted text, its settings, its check line by line, and the first requests.
import {request} from '../api.js';
import {Button, Field, Icon, Notice, Progress, Table, html, toast, useEffect, useRef, useState} from '../components.js';
import {bytes, count, plural} from '../format.js';
import {DEFAULT_MAX_TOKENS, SamplingForm, defaultsOf} from '../sampling_form.js';
import {AnswerForm, FREE} from './answer_form.js';
import {kindOf, refusalOf} from './records.js';
import {CHAT, COMPLETIONS, EMBEDDINGS, checkFile, defaultTemplate, fieldsOf, peek, promptOf} from './requests.js';

const WINDOW = '30d';
const MAX_METADATA = 512;
const KINDS = {jsonl: 'JSON Lines', csv: 'CSV', tsv: 'TSV (tabs)', text: 'Text, one prompt per line'};
const ENDPOINTS = {[CHAT]: 'Chat', [COMPLETIONS]: 'Completion', [EMBEDDINGS]: 'Embedding'};
const SETTINGS = {endpoint: CHAT, template: '', system: '', id_column: '', kept: '', answer: FREE,
  sampling: {max_tokens: DEFAULT_MAX_TOKENS}};
const WRONG_COLUMNS = [{key: 'line', label: 'Line'}, {key: 'error', label: 'Error'}];

const jobFiles = () => import('./job_files.js');
const names = (files) => files.map(({name}) => name).join(', ');

/** Uploads a checked file and starts its job. Resolves to the batch. */
async function startJob(name, {template, system, id_column, ...settings}, {file, url}) {
  const body = new FormData();
  body.append('purpose', 'batch');
  body.append('file', file, `${name.replace(/\.[^.]*$/, '')}.jsonl`);
  const {id} = await request('/v1/files', {body});
  const fields = settings.sampling && JSON.stringify(fieldsOf(settings));
  const pairs = Object.entries({name, template, system, id_column, settings: fields});
  const given = pairs.filter(([, text]) => text);
  const metadata = Object.fromEntries(given.map(([key, text]) => [key, text.slice(0, MAX_METADATA)]));
  try {
    const batch = {input_file_id: id, endpoint: url, completion_window: WINDOW, metadata};
    return await request('/v1/batches', {body: batch});
  } catch (error) {
    request(`/v1/files/${id}`, {method: 'DELETE'}).catch(() => {});
    throw error;
  }
}

/** Where files are dropped, chosen or pasted. */
function Chooser({onFiles, onDrop}) {
  const [over, setOver] = useState(false);
  const [pasted, setPasted] = useState('');
  const folder = useRef(null);
  const drag = (event) => {
    event.preventDefault();
    setOver(event.type === 'dragover');
    if (event.type !== 'drop') return;
    const {items, files} = event.dataTransfer;
    onDrop([...items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean), [...files]); // gone after the event
  };
  const choose = ({target}) => onFiles([...target.files], target.files[0]?.webkitRelativePath.split('/')[0]);
  return html`<div class=${`drop stack ${over ? 'over' : ''}`} onDragOver=${drag} onDragLeave=${drag} onDrop=${drag}>
    <${Field} label="Drop prompt files or a folder here, or choose them" help="JSON Lines (OpenAI's batch format, or
      objects with a prompt, text or messages), CSV or TSV with a header line, or text with one prompt per line. Of a
      folder, a zip file, several texts or PDFs, each file is one prompt.">
      <input type="file" multiple onChange=${choose} /><//>
    <div><${Button} onClick=${() => folder.current.click()}>Choose a folder<//>
      <input ref=${folder} type="file" hidden webkitdirectory aria-label="Folder" onChange=${choose} /></div>
    <details><summary>Paste text instead</summary><div class="stack">
      <${Field} label="Text"><textarea spellcheck=${false} value=${pasted}
        onInput=${(event) => setPasted(event.target.value)}></textarea><//>
      <div><${Button} disabled=${!pasted.trim()}
        onClick=${() => onFiles([new File([pasted], 'pasted')])}>Check text<//></div></div></details></div>`;
}

function Settings({settings, columns, kind, server, onChange}) {
  const bound = (name) => ({
    value: settings[name],
    onInput: ({target}) => onChange((now) => ({...now, [name]: target.value})),
  });
  const names = columns.slice(0, 12).map((name) => `{${name}}`).join(' ');
  return html`<div class="fields">
    <${Field} label="Task"><select ...${bound('endpoint')}>${Object.entries(ENDPOINTS).map(([url, label]) =>
      html`<option value=${url}>${label}</option>`)}</select><//>
    ${kind !== 'text' && !settings.kept && html`<${Field} label="Column that identifies the results"><select ...${bound('id_column')}>
      <option value="">custom_id, id or the line number</option>
      ${columns.map((name) => html`<option value=${name}>${name}</option>`)}</select><//>`}
    <div class="whole"><${Field} label="Template"
      help=${`${names && `Columns: ${names}. `}Write {{ and }} for braces.`}>
      <textarea rows="2" ...${bound('template')}></textarea><//></div>
    ${settings.endpoint === CHAT && html`<div class="whole"><${Field} label="System prompt"><textarea rows="2"
      ...${bound('system')}></textarea><//></div>`}
    ${settings.endpoint !== EMBEDDINGS && html`<${AnswerForm} answer=${settings.answer}
      onChange=${(answer) => onChange((now) => ({...now, answer}))} />`}
    ${settings.endpoint !== EMBEDDINGS && html`<details class="whole"><summary>Sampling settings</summary>
      <${SamplingForm} values=${settings.sampling} defaults=${defaultsOf(server)}
        onChange=${(sampling) => onChange((now) => ({...now, sampling}))} /></details>`}
  </div>`;
}

/** What is sent of the first line, whole: whether the right column was taken is seen here. */
function FirstPrompt({text}) {
  try {
    return html`<div role="group" aria-label="First prompt"><p class="muted small">The first prompt, as sent to the model:</p>
      <p class="first-prompt" tabindex="0">${promptOf(JSON.parse(text))}</p></div>`;
  } catch {
    return null; // an edited request that is not JSON
  }
}

const Preview = ({previews, onEdit}) => html`<details><summary>Preview and edit the first requests</summary>
  <div class="stack">${previews.map(({line, text, error}) => html`<${Field} key=${line} error=${error}
    label=${`Request of line ${line}`}><textarea rows="10" class="mono" spellcheck=${false} value=${text}
    onChange=${(event) => onEdit(line, event.target.value)}></textarea><//>`)}</div></details>`;

/** onStarted(batch, hasNext): a job was started; hasNext: the form shows the next of several files. */
export function JobForm({server, onStarted}) {
  const [source, setSource] = useState(null); // {name, blob, kind}; of files that are prompts also {files, texts}
  const [waiting, setWaiting] = useState([]); // files after this one
  const [found, setFound] = useState(null); // of `peek`
  const [settings, setSettings] = useState(SETTINGS);
  const [edits, setEdits] = useState(new Map());
  const [check, setCheck] = useState({});
  const [starting, setStarting] = useState(false);
  const [failure, setFailure] = useState('');
  const [refused, setRefused] = useState([]);
  const [reading, setReading] = useState(false);
  const [tokens, setTokens] = useState(null); // of files that are prompts: {tokens, isExact}
  const latest = useRef(0); // counts the checks: an older one ends

  const open = async (next) => {
    latest.current++;
    setFailure('');
    setEdits(new Map());
    setCheck({});
    setFound(null);
    setTokens(null);
    setSource(next);
    if (!next) return;
    const what = await peek(next.blob, next.kind);
    const name = next.texts ? 'file' : '';
    setSettings((now) => ({...now, template: defaultTemplate(what.columns, what.rows), id_column: name, kept: name}));
    setFound(what);
    if (next.texts) (await jobFiles()).tokensOfTexts(next.texts).then(setTokens);
  };
  const take = async ([file, ...others]) => {
    setWaiting(others);
    const start = await file?.slice(0, 4096).text();
    const why = file && refusalOf(file.name, start);
    if (why) {
      setRefused((now) => [...now, `${file.name} was refused: ${why}.`]);
      return take(others);
    }
    return open(file ? {name: file.name, blob: file, kind: kindOf(file.name, start)} : null);
  };
  const choose = async (files, folder) => {
    setRefused([]);
    const {arePrompts, readFiles} = await jobFiles();
    if (!arePrompts(files, folder)) return take(files);
    setReading(true);
    const {texts, skipped, blob} = await readFiles(files);
    setReading(false);
    setRefused(skipped);
    setWaiting([]);
    const name = folder || (files.length > 1 ? plural(files.length, 'file') : files[0].name);
    return open(texts.length ? {name, blob, kind: 'jsonl', texts, files} : null);
  };
  const drop = async (entries, files) => {
    const found = await (await jobFiles()).droppedFiles(entries, files);
    choose(found.files, found.folder);
  };
  const refusals = refused.length > 0 && html`<${Notice} kind=${source ? 'warning' : 'error'} onClose=${() => setRefused([])}>
    ${refused.map((text) => html`<p>${text}</p>`)}<//>`;

  const isBare = server.info.props?.has_chat_template === false; // its prompts are texts, as in `cppbatch batch`
  useEffect(() => {
    if (isBare) setSettings((now) => (now.endpoint === CHAT ? {...now, endpoint: COMPLETIONS} : now));
  }, [isBare, source]);

  useEffect(() => {
    if (!found) return undefined;
    const mine = ++latest.current;
    const isMine = () => latest.current === mine;
    const progress = (counts) => {
      if (isMine()) setCheck({...counts, isRunning: true});
      return isMine();
    };
    setCheck((now) => ({...now, isRunning: true}));
    const timer = setTimeout(async () => {
      const result = await checkFile(source.blob, source.kind, settings, edits, progress)
        .catch((error) => ({problem: error.message}));
      if (isMine()) setCheck({...result, settings, edits});
    }, 250);
    return () => clearTimeout(timer);
  }, [found, settings, edits]);

  const start = async () => {
    setStarting(true);
    setFailure('');
    try {
      const batch = await startJob(source.name, found.isRequests ? {} : settings, check);
      if (waiting.length) toast(`Started ${source.name}.`);
      take(waiting);
      onStarted(batch, waiting.length > 0);
    } catch (error) {
      setFailure(error.status ? error.message
        : 'The upload was interrupted. If the server is still running, the file may exceed its --max-file-mb.');
    }
    setStarting(false);
  };

  if (reading) return html`<div class="card" role="status"><p>Reading the files</p><${Progress} label="Reading the files" /></div>`;
  if (!source) return html`${refusals}<${Chooser} onFiles=${choose} onDrop=${drop} />`;
  const noun = source.texts ? 'file' : 'line';
  const {good = 0, bad = 0, wrong = [], previews = [], problem, isRunning} = check;
  const counts = `${plural(good, noun)} ready, ${count(bad)} invalid${bad ? ' and skipped' : ''}`;
  // Start must not send what was checked before the last change: a new check begins after the next paint.
  const isReady = found && !isRunning && !problem && check.settings === settings && check.edits === edits;
  return html`${refusals}<section class="card stack" aria-label="New job">
    <div class="row"><h2 class="grow name">${source.name}</h2>
      <span class="muted">${bytes(source.blob.size)}</span></div>
    ${source.texts ? html`<div class="row"><p class="grow">${plural(source.texts.length, 'file')}, ${source.texts.length > 1 && 'each '}one prompt${
        tokens && `: ${tokens.isExact ? '' : 'about '}${plural(tokens.tokens, 'token')}`}. Results have the names of files.</p>
      ${source.files.length > 1 && source.files.every(({name}) => /\.txt$/i.test(name)) && html`<${Button}
        onClick=${() => take(source.files)}>Read each line as a prompt<//>`}</div>`
    : html`<${Field} label="Format"><select value=${source.kind}
      onChange=${(event) => open({...source, kind: event.target.value})}>
      ${Object.entries(KINDS).map(([kind, label]) => html`<option value=${kind}>${label}</option>`)}</select><//>`}
    ${found?.isRequests && html`<p>Requests in OpenAI's batch format are sent unchanged.</p>`}
    ${found && !found.isRequests && html`<${Settings} settings=${settings} columns=${found.columns} kind=${source.kind}
      server=${server} onChange=${setSettings} />`}
    ${problem && html`<${Notice} kind="error">${problem}<//>`}
    ${isRunning && html`<div><p>Checking: ${counts}</p><${Progress} label="File check progress" /></div>`}
    ${isReady && html`<p role="status" class="row"><${Icon} name=${bad || !good ? 'alert' : 'check'} />
      <span class="grow">${counts}</span></p>`}
    ${wrong.length > 0 && html`<${Table} caption="Invalid lines" rows=${wrong} columns=${WRONG_COLUMNS} />`}
    ${bad > wrong.length && html`<p>and ${plural(bad - wrong.length, 'more line')}</p>`}
    ${previews.length > 0 && html`<${FirstPrompt} text=${previews[0].text} />`}
    ${previews.length > 0 && html`<${Preview} previews=${previews}
      onEdit=${(line, text) => setEdits(new Map([...edits, [line, text]]))} />`}
    ${failure && html`<${Notice} kind="error">The job was not started: ${failure}<//>`}
    <div class="row"><${Button} kind="primary" icon="send" busy=${starting} disabled=${starting || !isReady || !good}
        onClick=${start}>${starting ? 'Uploading…' : good ? `Start ${plural(good, noun)}` : 'Start'}<//>
      ${waiting.length > 0 && html`<${Button} onClick=${() => take(waiting)}>Skip this file<//>`}
      <${Button} onClick=${() => take([])}>Back<//></div>
    ${waiting.length > 0 && html`<p class="muted">${plural(waiting.length, 'more file')} to check: ${names(waiting)}</p>`}
  </section>`;
}
