// @ts-check
// What a reader may ask for in an empty conversation. onSend(text)
import {html} from '../components.js';

const EXAMPLES = [
  ['Explain', 'Explain how a rainbow forms, in three short paragraphs.'],
  ['Write code', 'Write a Python function that finds duplicate files in a folder, with a short explanation.'],
  ['Summarise', 'Summarise the pros and cons of working from home in a table.'],
  ['Ideas', 'Give me ten names for a small bakery in a harbour town.'],
];

export const Examples = ({onSend}) => html`<div class="examples" role="group" aria-label="Example prompts">
  ${EXAMPLES.map(([label, text]) => html`<button type="button" key=${label} class="example" onClick=${() => onSend(text)}>
    <strong>${label}</strong>${text}</button>`)}</div>`;
