// What the answers of a job may be: free texts, one of some texts, or JSON with typed columns. Writes the schema.
import {Button, Field, html} from '../components.js';

const KINDS = {text: 'Free text', choice: 'One of these texts', columns: 'Columns'};
const TYPES = {string: 'Text', choice: 'One of these texts', integer: 'Whole number', number: 'Number', boolean: 'Yes or no'};

export const FREE = {kind: 'text', choices: '', columns: [{name: '', type: 'string', choices: ''}]};

const listOf = (text) => [...new Set(text.split('\n').map((line) => line.trim()).filter(Boolean))];
const schemaOf = ({type, choices}) => (type === 'choice' ? {type: 'string', enum: listOf(choices)} : {type});

/** Why an answer cannot be constrained like this; '' if it can. */
export function problemOf({kind, choices, columns}) {
  if (kind === 'choice' && !listOf(choices).length) return 'Write the texts that are allowed, one per line.';
  if (kind !== 'columns') return '';
  const names = columns.map(({name}) => name.trim());
  if (names.some((name) => !name)) return 'Give each column of the answer a name.';
  const twice = names.find((name, i) => names.indexOf(name) !== i);
  if (twice) return `Two columns of the answer are named ${twice}: rename one of them.`;
  const empty = columns.find(({type, choices: own}) => type === 'choice' && !listOf(own).length);
  return empty ? `Write the texts that are allowed in ${empty.name}, one per line.` : '';
}

/** The fields of a request. */
export function answerFields({kind, choices, columns}) {
  if (kind === 'choice') return {guided_choice: listOf(choices)};
  if (kind !== 'columns') return {};
  const properties = Object.fromEntries(columns.map((column) => [column.name.trim(), schemaOf(column)]));
  const schema = {type: 'object', properties, required: Object.keys(properties), additionalProperties: false};
  return {json_schema: schema, compact_json: true};
}

const Choices = ({label, value, onInput}) => html`<${Field} label=${label}>
  <textarea rows="3" spellcheck=${false} placeholder=${'positive\nnegative'} value=${value} onInput=${onInput}></textarea><//>`;

function Column({column, n, onChange, onRemove}) {
  const set = (name) => ({target}) => onChange({...column, [name]: target.value});
  return html`<li class="stack"><div class="row column">
      <${Field} label=${`Name of column ${n}`}><input value=${column.name} onInput=${set('name')} /><//>
      <${Field} label=${`Type of column ${n}`}><select value=${column.type} onChange=${set('type')}>
        ${Object.entries(TYPES).map(([type, label]) => html`<option value=${type}>${label}</option>`)}</select><//>
      ${onRemove && html`<${Button} icon="close" label=${`Remove column ${n}`} onClick=${onRemove} />`}</div>
    ${column.type === 'choice' && html`<${Choices} label=${`Texts allowed in column ${n}, one per line`} value=${column.choices}
      onInput=${set('choices')} />`}</li>`;
}

export function AnswerForm({answer, onChange}) {
  const {kind, choices, columns} = answer;
  const setColumns = (next) => onChange({...answer, columns: next});
  return html`<div class="whole stack"><${Field} label="Answer"
      help="Texts and columns constrain the model: no other answer is possible. Columns become columns of the table.">
      <select value=${kind} onChange=${({target}) => onChange({...answer, kind: target.value})}>
      ${Object.entries(KINDS).map(([each, label]) => html`<option value=${each}>${label}</option>`)}</select><//>
    ${kind === 'choice' && html`<${Choices} label="Allowed answers, one per line" value=${choices}
      onInput=${({target}) => onChange({...answer, choices: target.value})} />`}
    ${kind === 'columns' && html`<ul class="stack">${columns.map((column, i) => html`<${Column} key=${i} column=${column}
        n=${i + 1} onChange=${(next) => setColumns(columns.with(i, next))}
        onRemove=${columns.length > 1 && (() => setColumns(columns.toSpliced(i, 1)))} />`)}</ul>
      <div><${Button} icon="plus" onClick=${() => setColumns([...columns, FREE.columns[0]])}>Add a column<//></div>`}</div>`;
}
