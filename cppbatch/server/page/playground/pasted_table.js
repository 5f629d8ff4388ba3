// A table pasted from a spreadsheet, or CSV: the first line names the columns. No DOM.

/**
 * Reads a table separated by tabs, semicolons or commas: {columns, rows}, each row a Map. Throws an `Error` that names
 * the line at fault.
 */
export function parseTable(source) {
  const [{fields: names = []} = {}, ...records] = readRecords(source.replace(/^\uFEFF/, ''));
  const columns = names.map((name) => name.trim());
  const twice = columns.find((name, i) => columns.indexOf(name) !== i);
  if (twice !== undefined) throw new Error(`The table has two columns named ${JSON.stringify(twice)}`);
  const rows = records.map(({line, fields}) => {
    if (fields.length < columns.length) throw new Error(`Line ${line} has ${fields.length} of ${columns.length} fields`);
    if (fields.slice(columns.length).some(Boolean)) {
      throw new Error(`Line ${line} has more than ${columns.length} fields: quote a text that contains the separator`);
    }
    return new Map(columns.map((name, i) => [name, fields[i]]));
  });
  return {columns, rows};
}

/** The fields of each record, and the line where it begins. Lines without text are left out. */
function readRecords(text) {
  const head = text.trimStart().split('\n', 1)[0];
  const separator = head.includes('\t') ? '\t' : head.includes(';') && !head.includes(',') ? ';' : ',';
  const field = new RegExp(`(?:"((?:[^"]|"")*)"|([^"${separator}\r\n][^${separator}\r\n]*)?)(${separator}|\r?\n|\r|$)`, 'y');
  const records = [];
  let line = 1;
  let record = {line, fields: []};
  while (field.lastIndex < text.length || record.fields.length) {
    const match = field.exec(text);
    if (!match) throw new Error(`Line ${line}: a quote begins here that is not closed, or has text behind it`);
    const [found, quoted, plain = '', end] = match;
    record.fields.push(quoted?.replaceAll('""', '"') ?? plain);
    line += found.split('\n').length - 1;
    if (end === separator) continue;
    if (record.fields.some((each) => each.trim()) || record.fields.length > 1) records.push(record);
    record = {line, fields: []};
  }
  return records;
}
