// From the form to a run: the prompts, what varies, and a label for each cell. No DOM.
import {TableReader} from '../jobs/records.js';
import {requestFields} from '../sampling_form.js';
import {PromptTemplate} from './prompt_template.js';
import {checkProduct, combinations, parseValues} from './vary.js';

export const EMPTY_FORM = {
  kind: 'chat', system: '', prompt: '', table: '', vary: [{name: 'temperature', values: '0..1.5 x 4'}], samples: 1,
  settings: {max_tokens: 128},
};

/** What is wrong in the field prompt, system, table, settings, samples, product, or vary0, vary1 ... */
export class FormError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

function within(field, work) {
  try {
    return work();
  } catch (error) {
    throw new FormError(field, error.message);
  }
}

/** The body of the request (see export_code.js), and the labels of its cells. Throws `FormError`. */
export function planRun(form) {
  if (!form.prompt.trim()) throw new FormError('prompt', 'Enter a prompt');
  const texts = {prompt: form.prompt, ...(form.kind === 'chat' && form.system.trim() && {system: form.system})};
  const rows = form.table.trim() ? fillTemplates(texts, within('table', () => parseTable(form.table))) : [{texts}];
  const varied = form.vary.map(({name, values}, i) => {
    if (form.vary.findIndex((each) => each.name === name) < i) throw new FormError(`vary${i}`, `${name} is varied twice`);
    return [name, within(`vary${i}`, () => parseValues(values))];
  }).filter(([, values]) => values.length);
  const samples = Number(form.samples);
  if (!(Number.isInteger(samples) && samples > 0)) throw new FormError('samples', 'Enter a whole number of at least 1');
  const counts = [[rows.length, 'prompts'], ...varied.map(([name, each]) => [each.length, name]), [samples, 'samples']];
  within('product', () => checkProduct(counts));
  const shared = within('settings', () => requestFields(form.settings));
  const params = combinations(varied, samples, shared.seed);
  for (const name of Object.keys(params[0])) delete shared[name];
  const label = (row, own, i) => {
    const settings = varied.map(([name]) => `${name} ${own[name]}`);
    const all = samples > 1 ? [...settings, `sample ${(i % samples) + 1}`] : settings;
    return [row.name, all.join(', ')].filter(Boolean).join(' · ');
  };
  return {
    body: {prompts: rows.map((row) => (form.kind === 'chat' ? conversation(row.texts) : row.texts.prompt)), params, ...shared},
    labels: rows.flatMap((row) => params.map((own, i) => label(row, own, i))),
  };
}

function conversation({system, prompt}) {
  const user = {role: 'user', content: prompt};
  return {messages: system ? [{role: 'system', content: system}, user] : [user]};
}

/** The columns and rows of a table that was pasted: CSV, or separated by tabs. Throws an `Error` that names the line. */
export function parseTable(source) {
  const reader = new TableReader(source.trimStart().split('\n', 1)[0].includes('\t') ? '\t' : null);
  const records = source.split('\n').flatMap((text, i) => [...reader.read(i + 1, text.replace(/\r$/, ''))]);
  if (reader.held.length) records.push(...reader.refuse());
  const wrong = records.find(({error}) => error);
  if (wrong) throw new Error(`Line ${wrong.line} ${wrong.error}`);
  return {columns: reader.columns ?? [], rows: records.map(({row}) => row).filter(Boolean)};
}

/** The texts of each row with its values, and a short name of the row. */
function fillTemplates(texts, {columns, rows}) {
  const templates = Object.entries(texts).map(([field, source]) => {
    const template = within(field, () => new PromptTemplate(source));
    const missing = template.fields.find((name) => !columns.includes(name));
    if (missing === undefined) return [field, template];
    throw new FormError(field, `{${missing}} is not a column of the table; available: ${columns.join(', ')}`);
  });
  const used = [...new Set(templates.flatMap(([, {fields}]) => fields))];
  if (!used.length) {
    throw new FormError('prompt', `Insert a column, such as {${columns[0]}}, or clear the table`);
  }
  if (!rows.length) throw new FormError('table', 'The table has no rows below the column names');
  return rows.map((row) => {
    const name = used.map((field) => row[field]).join(', ').replace(/\s+/g, ' ');
    return {
      texts: Object.fromEntries(templates.map(([field, template]) => [field, template.render(row)])),
      name: name.length > 40 ? `${name.slice(0, 39)}…` : name,
    };
  });
}
