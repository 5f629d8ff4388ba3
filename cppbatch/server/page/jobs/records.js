// Reads a file piece by piece, so that the page goes on meanwhile: its records with the numbers of their lines. No DOM.

const MAX_LINE = 1 << 24; // characters
const MAX_HELD = 5000; // lines of a record of a table
const SLICE = 1 << 19; // bytes read at once: a few milliseconds of work
const KINDS = {jsonl: 'jsonl', ndjson: 'jsonl', json: 'jsonl', csv: 'csv', tsv: 'tsv', txt: 'text'};

const extensionOf = (name) => name.split('.').pop().toLowerCase();

/** Why a file is refused as a whole, null if it is not. start: its first characters, decoded as UTF-8. */
export function refusalOf(name, start) {
  const extension = extensionOf(name);
  const isKnown = Object.hasOwn(KINDS, extension) || extension === name.toLowerCase();
  if (!start.includes('\0') && (isKnown || !start.includes('\ufffd'))) return null;
  return isKnown ? 'it is not UTF-8 text; save it as UTF-8'
    : `unknown input format '.${extension}'; the extension must be one of ${Object.keys(KINDS).map((each) => `.${each}`).join(', ')}`;
}

/** The kind of a file by the end of its name, else by how it begins: jsonl, csv, tsv or text. */
export function kindOf(name, start) {
  const [header] = start.trimStart().split('\n', 1);
  const guess = /^[{"[]/.test(header) ? 'jsonl' : header.includes('\t') ? 'tsv'
    : /^[^\s,;]+([,;][^\s,;]+)+\s*$/.test(header) ? 'csv' : 'text';
  return KINDS[extensionOf(name)] ?? guess;
}

/** The lines of a blob, in groups. A byte order mark and line ends are left out. Other work runs between two groups. */
export async function* lineGroups(blob) {
  const decoder = new TextDecoder();
  let rest = '';
  for (let at = 0; at < blob.size; at += SLICE) {
    const slice = await blob.slice(at, at + SLICE).arrayBuffer();
    const lines = (rest + decoder.decode(slice, {stream: true})).split('\n');
    rest = lines.pop().slice(0, MAX_LINE + 1); // a longer line is refused, whatever its length
    yield lines.map((line) => (line.endsWith('\r') ? line.slice(0, -1) : line));
    await new Promise((resolve) => setTimeout(resolve));
  }
  if (rest) yield [rest];
}

/** The values of a record of a table; null if a quoted text does not end in it. */
function valuesOf(text, separator) {
  const value = new RegExp(`(?:"([^"]*(?:""[^"]*)*)"|([^"${separator}][^${separator}]*)?)(${separator}|$)`, 'y');
  const values = [];
  for (;;) {
    const at = value.lastIndex;
    const match = value.exec(text);
    if (!match && /^"[^"]*(?:""[^"]*)*$/.test(text.slice(at))) return null;
    if (!match) throw new Error('has text after a closing quote: double the quotes within a value');
    values.push(match[1]?.replaceAll('""', '"') ?? match[2] ?? '');
    if (!match[3]) return values;
  }
}

/** Makes records of the lines of a table. The first one names the columns. */
export class TableReader {
  held = []; // the lines of a record that has not ended: [number, text]

  constructor(separator) {
    this.separator = separator;
  }

  * read(number, text) {
    if (!this.held.length && !text.trim()) return;
    this.separator ??= text.includes(';') && !text.includes(',') ? ';' : ',';
    this.held.push([number, text]);
    const isLong = this.held.length > MAX_HELD;
    if (this.held.length > 1 && !isLong && !text.includes('"')) return;
    const whole = this.held.map((line) => line[1]).join('\n');
    let values;
    try {
      values = valuesOf(whole, this.separator);
    } catch (error) {
      yield* this.refuse(error.message);
      return;
    }
    if (values) yield this.record(this.held[0][0], values);
    if (values) this.held = [];
    else if (isLong) yield* this.refuse();
  }

  /** Refuses the first line of what has not ended, and reads its other lines again. */
  * refuse(error = 'has a quote that is not closed') {
    const [[line], ...others] = this.held;
    this.held = [];
    yield {line, error};
    for (const other of others) yield* this.read(...other);
  }

  record(line, values) {
    const n = this.columns?.length;
    if (n === undefined) return {columns: (this.columns = values.map((name) => name.trim()))};
    if (values.length < n || values.slice(n).some(Boolean)) {
      const advice = values.length > n ? `: quote values that contain ${this.separator}` : '';
      return {line, error: `has ${values.length} fields, but the first line names ${n}${advice}`};
    }
    return {line, row: Object.fromEntries(this.columns.map((name, i) => [name, values[i]]))};
  }
}

function jsonRecord(line, text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    const advice = text.trim() === '[' ? '. Write an object on each line, without [ ] around them' : '';
    return {line, error: `is not valid JSON: ${error.message}${advice}`};
  }
  if (typeof value === 'string') return {line, row: {prompt: value}};
  if (!value || typeof value !== 'object' || Array.isArray(value)) {
    return {line, error: `${text.slice(0, 40)} is neither an object nor a string`};
  }
  return 'url' in value || 'body' in value ? {line, text, request: value} : {line, row: value};
}

/**
 * The records of a file in groups: {line, row}; {line, text, request} for a request in OpenAI's form; {line, error} for
 * what cannot be read; {columns} before the rows of a table.
 */
export async function* recordGroups(blob, kind) {
  const table = kind === 'csv' || kind === 'tsv' ? new TableReader(kind === 'tsv' ? '\t' : null) : null;
  let line = 0;
  for await (const lines of lineGroups(blob)) {
    const group = [];
    for (const text of lines) {
      line++;
      if (text.length > MAX_LINE) group.push({line, error: `is longer than ${MAX_LINE} characters`});
      else if (/[\0\ufffd]/.test(text)) group.push({line, error: 'is not UTF-8 text: save the file as UTF-8'});
      else if (table) group.push(...table.read(line, text));
      else if (text.trim()) group.push(kind === 'jsonl' ? jsonRecord(line, text) : {line, row: {prompt: text}});
    }
    yield group;
  }
  while (table?.held.length) yield [...table.refuse()];
}
