// A table pasted from a spreadsheet, or CSV: the first line names the columns. No DOM.

/**
 * Reads a table separated by tabs, semicolons or commas: {columns, rows}, each row a Map. Throws an `Error` that names
 * the line at fault.
 */
export function parseTable(source) {
  const [first, ...records] = readRecords(source.replace(/^\uFEFF/, ''));
  const columns = (first?.fields ?? []).map((name) => name.trim());
  const twice = columns.find((name, i) => columns.indexOf(name) !== i);
  if (twice !== undefined) throw new Error(`The table has two columns named ${JSON.stringify(twice)}`);
  const rows = records.map(({line, fields}) => {
    if (fields.length < columns.length || fields.slice(columns.length).some(Boolean)) {
      const advice = fields.length > columns.length ? ': quote a text that contains the separator' : '';
      throw new Error(`Line ${line} has ${fields.length} fields, and the first line names ${columns.length}${advice}`);
    }
    return new Map(columns.map((name, i) => [name, fields[i]]));
  });
  return {columns, rows};
}

/** The fields of each record, and the line where it begins. Lines without text are left out. */
function readRecords(text) {
  const head = text.trimStart().split('\n', 1)[0];
  const delimiter = head.includes('\t') ? '\t' : head.includes(';') && !head.includes(',') ? ';' : ',';
  const records = [];
  let line = 1;
  for (let i = 0; i < text.length; line++) {
    const [start, fields] = [i, []];
    const first = line;
    for (;; i++) {
      let field = '';
      if (text[i] === '"') {
        for (i++; text[i] !== '"' || text[i + 1] === '"'; i++) {
          if (i >= text.length) throw new Error(`Line ${first}: a quote that begins here is not closed`);
          if (text[i] === '\n') line++;
          if (text[i] === '"') i++;
          field += text[i];
        }
        i++;
        if (i < text.length && !`${delimiter}\r\n`.includes(text[i])) {
          throw new Error(`Line ${line} has text behind a closing quote: double the quotes within a field`);
        }
      } else {
        while (i < text.length && !`${delimiter}\r\n`.includes(text[i])) field += text[i++];
      }
      fields.push(field);
      if (text[i] !== delimiter) break;
    }
    if (text.slice(start, i).trim()) records.push({line: first, fields});
    if (text[i] === '\r') i++;
    if (text[i] === '\n') i++;
  }
  return records;
}
