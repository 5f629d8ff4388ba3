// Results of a job: read, joined with the columns of its input, and how long the rest takes. No DOM.
import {lineGroups} from './records.js';
import {textOf} from './requests.js';

const ANSWERS = ['answer', 'finish_reason', 'prompt_tokens', 'completion_tokens', 'error'];

/** A line of an output or error file: id, line if it names one, and error or the other ANSWERS. */
export function resultOf(text) {
  const {response, error, ...short} = JSON.parse(text);
  const found = {id: short.custom_id, line: short.line};
  const body = response?.body ?? short;
  const problem = error ?? body.error;
  if (problem) return {...found, error: problem.message ?? textOf(problem)};
  const choices = body.choices ?? ('text' in body ? [body] : []);
  const answers = [
    ...choices.map((choice) => choice.message?.content ?? choice.text),
    ...(body.output ?? []).flatMap((item) => item.content ?? []).map((part) => part.text),
    ...(body.data ?? []).map((item) => item.embedding),
    ...(body.embeddings ?? [body.embedding, body.results].filter(Boolean)),
  ];
  const usage = body.usage ?? {};
  return {
    ...found,
    answer: textOf(answers.length === 1 ? answers[0] : answers),
    finish_reason: choices[0]?.finish_reason ?? body.status,
    prompt_tokens: usage.prompt_tokens ?? usage.input_tokens,
    completion_tokens: usage.completion_tokens ?? usage.output_tokens,
  };
}

/** The name and the columns of a line of an input file. */
export function inputOf(text, number) {
  const {custom_id: id, row, body, ...fields} = JSON.parse(text);
  if (!body) return {id: textOf(id ?? fields.id) || `line-${number}`, row: fields};
  const prompt = body.messages?.at(-1)?.content ?? body.prompt ?? body.input ?? body.query;
  return {id, row: row ?? {prompt: textOf(prompt)}, schema: body.json_schema};
}

/** Calls `use` with what `parse(line, number)` makes of each line of a blob; what is not JSON is left out. */
export async function eachLine(blob, parse, use) {
  let number = 0;
  for await (const lines of lineGroups(blob)) {
    for (const line of lines) {
      number++;
      let value = null;
      try {
        value = parse(line, number);
      } catch { /* it is in the file of errors */ }
      if (value) use(value);
    }
  }
}

/** An answer in JSON as columns: a text as it is, and the properties of an object. {} if it was cut off. */
function columnsOf(answer) {
  try {
    const value = JSON.parse(answer);
    return typeof value === 'string' ? {answer: value} : value;
  } catch {
    return {};
  }
}

const cell = (value) => (/[",\r\n]/.test(textOf(value)) ? `"${textOf(value).replaceAll('"', '""')}"` : textOf(value));
const csvLine = (values) => `${values.map(cell).join(',')}\n`;

/** The rows of the input in their order with the answers as further columns, as CSV. Takes and returns blobs. */
export async function joinCsv(input, output, errors) {
  const results = new Map();
  for (const blob of [output, errors]) await eachLine(blob, resultOf, (result) => results.set(result.id, result));
  const columns = new Set();
  const properties = new Set(); // of the schemas
  await eachLine(input, inputOf, ({row, schema}) => {
    Object.keys(row).forEach((name) => columns.add(name));
    Object.keys(schema?.properties ?? {}).forEach((name) => properties.add(name));
  });
  const names = [ANSWERS[0], ...[...properties].filter((name) => !ANSWERS.includes(name)), ...ANSWERS.slice(1)];
  let suffix = '';
  for (let n = 2; names.some((name) => columns.has(name + suffix)); n++) suffix = `_${n}`;
  const areFiles = columns.size === 1 && columns.has('file'); // which are named by it
  const ids = columns.has('custom_id') || areFiles ? [] : ['custom_id'];
  const parts = [csvLine([...ids, ...columns, ...names.map((name) => name + suffix)])];
  await eachLine(input, inputOf, ({id, row, schema}) => {
    const result = results.get(id) ?? {};
    const typed = schema ? columnsOf(result.answer) : {};
    const answers = {...typed, ...result, answer: typed.answer ?? result.answer};
    const values = [...columns].map((name) => row[name]);
    parts.push(csvLine([...ids.map(() => id), ...values, ...names.map((name) => answers[name])]));
  });
  return new Blob(parts, {type: 'text/csv'});
}

/** How fast a count grows, over the last minute. */
export class Rate {
  samples = [];
  value = null; // per second, once it is known

  /** now: in seconds. */
  add(n, now) {
    this.samples.push({n, now});
    while (this.samples.length > 2 && this.samples[1].now <= now - 60) this.samples.shift();
    const [first] = this.samples;
    if (now > first.now) this.value = (n - first.n) / (now - first.now);
  }
}
