// Files that are one prompt each: of a folder, of a zip file, or several. They become lines of JSON with `file` and `text`.
import {tokensOf} from '../chat/context_meter.js';
import {documentTexts, isPdf} from '../documents.js';
import {bytes, plural} from '../format.js';

const LARGEST = 1 << 24; // bytes of a text: of a line, too
const LINES = /\.(jsonl|ndjson|json|csv|tsv)$/i;
const PROMPTS = /\.(zip|pdf|md)$/i; // a single one has no lines of prompts
const N_SKIPPED = 8; // of which a sentence is shown
const N_COUNTED = 20; // texts whose tokens are counted; of more, they are estimated
const COUNTED = 100_000; // characters of each

/** The files of a drop and of its folders, given the entries of its items. Their `path` is the name below the folder. */
export async function droppedFiles(entries, files) {
  if (!entries.some((entry) => entry.isDirectory)) return {files, folder: null};
  const found = [];
  const walk = async (entry, path) => {
    if (entry.isFile) {
      const file = await new Promise((resolve, reject) => { entry.file(resolve, reject); });
      found.push(Object.assign(file, {path}));
      return;
    }
    const reader = entry.createReader();
    for (;;) { // it gives up to 100 entries at once
      const some = await new Promise((resolve, reject) => { reader.readEntries(resolve, reject); });
      if (!some.length) return;
      for (const each of some) await walk(each, `${path ? `${path}/` : ''}${each.name}`);
    }
  };
  for (const entry of entries) await walk(entry, entries.length > 1 ? entry.name : entry.isFile ? entry.name : '');
  return {files: found, folder: entries.length > 1 ? `${entries.length} folders` : entries[0].name};
}

/** Whether each file is a prompt, and not each line. folder: they are those of a folder. */
export const arePrompts = (files, folder) => Boolean(folder) || (files.length === 1 && PROMPTS.test(files[0].name))
  || (files.length > 1 && !files.some(({name}) => LINES.test(name)));

async function textOfFile(file, name) {
  const parts = name.split('/');
  const hidden = parts.findIndex((part) => part.startsWith('.') || part === '__MACOSX');
  if (hidden >= 0) return {skipped: [{file: parts.slice(0, hidden + 1).join('/'), reason: 'hidden'}]};
  if (/\.zip$/i.test(name) || await isPdf(file)) {
    const {files, skipped} = await documentTexts(file).catch(({message}) => ({files: [], skipped: [{file: name, reason: message}]}));
    const isZip = /\.zip$/i.test(name);
    return {files: files.map((each) => (isZip ? each : {...each, file: name})), skipped: isZip ? skipped : skipped.map(({reason}) => ({file: name, reason}))};
  }
  const reason = file.size > LARGEST ? `is longer than ${bytes(LARGEST)}, the limit for one prompt; split it` : null;
  if (reason) return {skipped: [{file: name, reason}]};
  try {
    const text = new TextDecoder('utf-8', {fatal: true}).decode(await file.arrayBuffer());
    if (text.includes('\0')) return {skipped: [{file: name, reason: 'not text'}]};
    return text.trim() ? {files: [{file: name, text}]} : {skipped: [{file: name, reason: 'empty'}]};
  } catch {
    return {skipped: [{file: name, reason: 'not text'}]};
  }
}

/** The texts of files, sorted by name, as lines of JSON, and sentences about those without a text. */
export async function readFiles(files) {
  const found = [];
  const skipped = new Set();
  for (const file of files) {
    const one = await textOfFile(file, file.path ?? (file.webkitRelativePath.split('/').slice(1).join('/') || file.name));
    found.push(...one.files ?? []);
    for (const each of one.skipped ?? []) skipped.add(`${each.file} was left out: ${each.reason}.`);
  }
  found.sort((one, other) => (one.file < other.file ? -1 : 1));
  const sentences = [...skipped];
  const more = sentences.splice(N_SKIPPED).length;
  if (more) sentences.push(`${plural(more, 'more file')} left out.`);
  return {texts: found.map(({text}) => text), skipped: sentences, blob: new Blob(found.map((each) => `${JSON.stringify(each)}\n`))};
}

/** The tokens of texts: {tokens, isExact}; null if the server does not say. */
export async function tokensOfTexts(texts) {
  let tokens = 0;
  let counted = 0;
  for (const text of texts.slice(0, N_COUNTED)) {
    const some = text.slice(0, COUNTED);
    const n = await tokensOf(some);
    if (n === undefined) return null;
    tokens += n;
    counted += some.length;
  }
  const all = texts.reduce((sum, {length}) => sum + length, 0);
  return {tokens: Math.round(tokens * all / counted), isExact: all === counted};
}
