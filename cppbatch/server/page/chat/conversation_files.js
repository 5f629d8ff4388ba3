// @ts-check
// Conversations saved as files, and read from them.
import {download, toast} from '../components.js';
import {plural} from '../format.js';
import {EXPORTS, readFile, toMarkdown} from './exchange.js';

const fileName = (title) => title.replace(/[^\p{L}\p{N}]+/gu, '-').slice(0, 50) || 'conversation';

/** format: a label of EXPORTS, or 'Markdown'. */
export function save(format, conversations, title) {
  if (format === 'Markdown') return download(`${fileName(title)}.md`, toMarkdown(conversations[0]), 'text/markdown');
  const {name, write, type} = EXPORTS.find(({label}) => label === format);
  return download(name(fileName(title)), write(conversations), type);
}

export async function importFiles(state, files) {
  for (const file of files) {
    try {
      const conversations = await readFile(file);
      state.import(conversations);
      toast(`${plural(conversations.length, 'conversation')} imported.`);
    } catch (error) {
      toast(`${file.name} could not be imported: ${error.message}`, 'error');
    }
  }
}
