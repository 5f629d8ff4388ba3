// Checks a file line by line, and makes the file that the server gets. No DOM.
import {recordGroups} from './records.js';
import {RequestMaker} from './requests.js';

const N_PREVIEWS = 3;
const MAX_SHOWN = 100;

/** The columns of the first record of a file, and whether it is a request in OpenAI's form. */
export async function peek(blob, kind) {
  for await (const group of recordGroups(blob, kind)) {
    const first = group.find((record) => !record.error);
    if (first) return {columns: first.columns ?? Object.keys(first.row ?? {}), isRequests: Boolean(first.request)};
  }
  return {columns: [], isRequests: false};
}

/**
 * Checks all lines. settings: as in `RequestMaker`; edits: a Map from line numbers to texts. `progress` gets the counts
 * so far, and ends the check by returning false.
 *
 * Resolves to {good, bad, wrong, previews, url, file}: the counts of lines, the first wrong ones as {line, error}, the
 * first requests as {line, text, error}, the endpoint, and the batch file without the wrong lines.
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
      if (error) found.bad++;
      else found.good++;
      if (error && found.wrong.length < MAX_SHOWN) found.wrong.push({line, error});
      if (text && found.previews.length < N_PREVIEWS) {
        found.previews.push({line, text: error ? text : JSON.stringify(JSON.parse(text), null, 2), error});
      }
      asIs &&= record.text === text && !error;
    }
    parts.push(new Blob(lines.map((line) => `${line}\n`))); // the browser may keep it on disk
    if (!progress(found)) break;
  }
  return Object.assign(found, {url: maker.url, file: asIs ? blob : new Blob(parts)});
}
