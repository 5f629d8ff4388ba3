// Makes requests in OpenAI's batch format of records, and checks those that have this format already. No DOM.
import {PromptTemplate} from '../playground/prompt_template.js';

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

/** The template to begin with; '' if each line has its own messages. */
export function defaultTemplate(columns) {
  if (columns.includes('messages')) return '';
  const name = ['prompt', 'text', 'input', 'question'].find((each) => columns.includes(each)) ?? columns[0];
  return name ? `{${name}}` : '';
}

const shown = (value) => (JSON.stringify(value) ?? 'missing').slice(0, 60);

/** The requests of one job. Its methods throw errors that say what is wrong with a line. */
export class RequestMaker {
  /**
   * settings: endpoint, template, system, max_tokens, temperature, schema, id_column; all are texts, '' if not set.
   * Throws an error that says which one is wrong.
   */
  constructor(settings) {
    this.settings = settings;
    this.url = null; // of the job: that of its first request
    this.lines = new Map(); // by custom_id
    const {endpoint, schema} = settings;
    let name = 'Template';
    try {
      this.template = new PromptTemplate(settings.template);
      if (settings.template && !this.template.fields.length) throw new Error('It names no column, like {text}');
      name = 'JSON schema';
      this.format = schema && {type: 'json_schema', json_schema: {name: 'answer', schema: JSON.parse(schema)}};
    } catch (error) {
      throw new Error(`${name}: ${error.message}`);
    }
    const fields = endpoint === EMBEDDINGS ? [] : ['max_tokens', 'temperature'].filter((each) => settings[each]);
    this.fields = Object.fromEntries(fields.map((each) => [each, Number(settings[each])]));
    if (this.format && endpoint !== EMBEDDINGS) this.fields.response_format = this.format;
  }

  /** The line of the batch file for a record of `recordGroups`. edited: its text as the reader changed it. */
  lineOf({line, text, row, request}, edited) {
    const made = edited === undefined ? request ?? this.fromRow(line, row) : JSON.parse(edited);
    this.check(made);
    const other = this.lines.get(made.custom_id);
    if (other) throw new Error(`has the custom_id ${shown(made.custom_id)} of line ${other}: each line needs its own`);
    this.url ??= made.url;
    this.lines.set(made.custom_id, line);
    return text && edited === undefined ? text : JSON.stringify(made);
  }

  check(request) {
    const {custom_id: id, method = 'POST', url, body} = request ?? {};
    if (typeof id !== 'string' || !id || id.length > MAX_ID) {
      throw new Error(`custom_id is ${shown(id)}: it must be a text of 1 to ${MAX_ID} characters`);
    }
    if (method !== 'POST') throw new Error(`method is ${shown(method)}: it must be POST`);
    if (!Object.hasOwn(REQUIRED, url)) {
      throw new Error(`url is ${shown(url)}: it must be one of ${Object.keys(REQUIRED).join(', ')}`);
    }
    if (this.url && url !== this.url) throw new Error(`url is ${url}, but this job is for ${this.url}`);
    const missing = REQUIRED[url].find((name) => !body?.[name]?.length);
    if (missing) throw new Error(`body has no ${missing}, which ${url} needs`);
    if (body.stream) throw new Error('stream is true: results of a job do not stream, leave it out');
  }

  fromRow(line, row) {
    const {id_column: wanted} = this.settings;
    const id = row[wanted || ['custom_id', 'id'].find((name) => row[name] != null)] ?? '';
    if (wanted && id === '') throw new Error(`has no ${wanted}, which names the result`);
    const [url, body] = this.settings.template ? this.fromPrompt(this.render(row)) : this.fromMessages(row);
    const custom_id = id === '' ? `line-${line}` : Number.isInteger(id) ? String(id) : id;
    return {custom_id, method: 'POST', url, body, row};
  }

  render(row) {
    const missing = this.template.fields.find((name) => row[name] == null);
    const names = Object.keys(row).filter((name) => row[name] != null).join(', ');
    if (missing) throw new Error(`has no ${missing}; it has ${names.slice(0, 200) || 'nothing'}`);
    const textOf = (value) => (typeof value === 'string' ? value : JSON.stringify(value));
    return this.template.render(new Map(Object.entries(row).map(([name, value]) => [name, textOf(value)])));
  }

  fromPrompt(prompt) {
    if (!prompt.trim()) throw new Error('has an empty prompt');
    const {endpoint} = this.settings;
    if (endpoint === EMBEDDINGS) return [endpoint, {input: prompt}];
    if (endpoint === COMPLETIONS) return [endpoint, {prompt, ...this.fields}];
    return this.fromMessages({messages: [{role: 'user', content: prompt}]});
  }

  fromMessages({messages}) {
    if (!Array.isArray(messages)) throw new Error(`messages is ${shown(messages)}: give a list of them, or a template`);
    const {system} = this.settings;
    const first = system && messages[0]?.role !== 'system' ? [{role: 'system', content: system}] : [];
    return [CHAT, {messages: [...first, ...messages], ...this.fields}];
  }
}
