// Makes requests in OpenAI's batch format of records, and checks those that have this format already.
import {PromptTemplate} from '../playground/prompt_template.js';
import {requestFields} from '../sampling_form.js';
import {FREE, answerFields, problemOf} from './answer_form.js';
import {recordGroups} from './records.js';

export const CHAT = '/v1/chat/completions';
export const COMPLETIONS = '/v1/completions';
export const EMBEDDINGS = '/v1/embeddings';

/** What the body of each endpoint must have. */
const REQUIRED = {
  [CHAT]: ['messages'],
  [COMPLETIONS]: ['prompt'],
  '/v1/responses': ['input'],
  [EMBEDDINGS]: ['input'],
  '/v1/rerank': ['query', 'documents'],
};
const MAX_ID = 512;
const N_PREVIEWS = 3;
const MAX_SHOWN = 100;
const N_GUESSED = 20;

/** The columns of the first record of a file, its first rows, and whether it is a request in OpenAI's form. */
export async function peek(blob, kind) {
  for await (const group of recordGroups(blob, kind)) {
    const first = group.find((record) => !record.error);
    const rows = group.flatMap(({row}) => row ?? []).slice(0, N_GUESSED);
    if (first) return {columns: first.columns ?? Object.keys(first.row ?? {}), rows, isRequests: Boolean(first.request)};
  }
  return {columns: [], rows: [], isRequests: false};
}

/** The template to begin with: a column by its name, or with the longest texts; '' if each line has its own messages. */
export function defaultTemplate(columns, rows) {
  if (columns.includes('messages')) return '';
  const length = (column) => rows.reduce((sum, row) => sum + textOf(row[column]).length, 0);
  const name = ['prompt', 'text', 'input', 'question'].find((each) => columns.includes(each))
    ?? columns.toSorted((one, other) => length(other) - length(one))[0];
  return name ? `{${name}}` : '';
}

/** The text that the model gets of a request: its prompt, or its last message. */
export function promptOf(request) {
  const {prompt, input, messages} = request.body ?? {};
  return textOf(prompt ?? input ?? messages?.at(-1)?.content);
}

export const textOf = (value) => (typeof value === 'string' ? value : value == null ? '' : JSON.stringify(value));
const shown = (value) => (JSON.stringify(value) ?? 'missing').slice(0, 60);

/** The fields of each request that its settings make. */
export const fieldsOf = ({endpoint, sampling, answer = FREE}) =>
  (endpoint === EMBEDDINGS ? {} : {...requestFields(sampling), ...answerFields(answer)});

/** The requests of one job. Its methods throw errors that say what is wrong with a line. */
export class RequestMaker {
  url = null; // of the job: that of its first request
  lines = new Map(); // by custom_id

  /**
   * settings: endpoint, template, system, id_column ('' if not set); sampling, the values of a `SamplingForm`; answer, of an
   * `AnswerForm`; kept: the only column that stays with the request (all, if not set).
   */
  constructor(settings) {
    this.settings = settings;
    this.template = new PromptTemplate(settings.template);
    if (settings.template && !this.template.fields.length) throw new Error('The template does not name a column.');
    const {answer = FREE} = settings;
    const problem = settings.endpoint !== EMBEDDINGS && problemOf(answer);
    if (problem) throw new Error(problem);
    this.fields = fieldsOf(settings);
  }

  /** The line of the batch file for a record of `recordGroups`. edited: its text as the reader changed it. */
  lineOf({line, text, row, request}, edited) {
    const made = edited === undefined ? request ?? this.fromRow(line, row) : JSON.parse(edited);
    this.check(made);
    const other = this.lines.get(made.custom_id);
    if (other) {
      const id = shown(made.custom_id);
      throw new Error(`has the same custom_id as line ${other}, ${id}: each custom_id must be unique`);
    }
    this.url ??= made.url;
    this.lines.set(made.custom_id, line);
    return text && edited === undefined ? text : JSON.stringify(made);
  }

  check(request) {
    const {custom_id: id, method = 'POST', url, body} = request ?? {};
    const refuse = (name, value, needed) => { throw new Error(`${name} is ${shown(value)}: it must be ${needed}`); };
    if (typeof id !== 'string' || !id || id.length > MAX_ID) refuse('custom_id', id, `1 to ${MAX_ID} characters`);
    if (method !== 'POST') refuse('method', method, 'POST');
    if (!Object.hasOwn(REQUIRED, url)) refuse('url', url, `one of ${Object.keys(REQUIRED).join(', ')}`);
    if (this.url && url !== this.url) refuse('url', url, `${this.url}, as in the first line`);
    const missing = REQUIRED[url].find((name) => !body?.[name]?.length);
    if (missing) throw new Error(`body has no ${missing}, which ${url} requires`);
    if (body.stream) refuse('stream', true, 'left out, because job results cannot be streamed');
  }

  fromRow(line, row) {
    const {id_column: wanted, template, endpoint} = this.settings;
    const id = row[wanted || ['custom_id', 'id'].find((name) => row[name] != null)] ?? '';
    if (wanted && id === '') throw new Error(`has no ${wanted}, which identifies the result`);
    const body = template ? this.fromPrompt(this.render(row)) : this.fromMessages(row);
    const custom_id = id === '' ? `line-${line}` : Number.isInteger(id) ? String(id) : id;
    const {kept} = this.settings;
    return {custom_id, method: 'POST', url: template ? endpoint : CHAT, body, row: kept ? {[kept]: row[kept]} : row};
  }

  render(row) {
    const found = Object.entries(row).filter(([, value]) => value != null);
    const values = Object.fromEntries(found.map(([name, value]) => [name, textOf(value)]));
    const missing = this.template.fields.find((name) => !Object.hasOwn(values, name));
    const names = Object.keys(values).join(', ').slice(0, 200) || 'nothing';
    if (missing) throw new Error(`has no ${missing}; it has ${names}`);
    return this.template.render(values);
  }

  fromPrompt(prompt) {
    const {endpoint} = this.settings;
    if (!prompt.trim()) throw new Error('has an empty prompt');
    if (endpoint === CHAT) return this.fromMessages({messages: [{role: 'user', content: prompt}]});
    return {[REQUIRED[endpoint][0]]: prompt, ...this.fields};
  }

  fromMessages({messages}) {
    if (!Array.isArray(messages)) throw new Error(`messages is ${shown(messages)}: give a list, or use a template`);
    const {system} = this.settings;
    const first = system && messages[0]?.role !== 'system' ? [{role: 'system', content: system}] : [];
    return {messages: [...first, ...messages], ...this.fields};
  }
}

/**
 * Checks all lines. edits: a Map from line numbers to texts. `progress` gets the counts so far, and ends the check by
 * returning false. Resolves to {good, bad, wrong, previews, url, file}: the counts of lines, the first wrong ones as
 * {line, error}, the first requests as {line, text, error}, the endpoint, and the batch file without the wrong lines.
 */
export async function checkFile(blob, kind, settings, edits, progress) {
  const maker = new RequestMaker(settings);
  const found = {good: 0, bad: 0, wrong: [], previews: [], url: null, file: null};
  const parts = [];
  let asIs = true;
  for await (const group of recordGroups(blob, kind)) {
    const lines = [];
    for (const record of group) {
      const {line, columns} = record;
      const twice = columns?.find((name, i) => name && columns.indexOf(name) !== i);
      if (twice) throw new Error(`Two columns are named ${twice}: rename one of them.`);
      if (columns) continue;
      const edited = edits.get(line);
      let text = edited;
      let error = edited === undefined && record.error;
      try {
        if (!error) lines.push(text = maker.lineOf(record, edited));
      } catch (problem) {
        error = problem.message;
      }
      found[error ? 'bad' : 'good']++;
      if (error && found.wrong.length < MAX_SHOWN) found.wrong.push({line, error});
      if (text && found.previews.length < N_PREVIEWS) {
        found.previews.push({line, text: error ? text : JSON.stringify(JSON.parse(text), null, 2), error});
      }
      asIs &&= record.text === text && !error;
    }
    parts.push(new Blob(lines.map((line) => `${line}\n`))); // the browser may keep it on disk
    if (!progress(found)) break;
  }
  return {...found, url: maker.url, file: asIs ? blob : new Blob(parts)};
}
