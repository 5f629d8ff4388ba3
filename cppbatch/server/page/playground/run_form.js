// The form of a run: the prompt, the table, what varies, and the settings of all cells.
import {Button, Field, Notice, html} from '../components.js';
import {plural} from '../format.js';
import {SAMPLING, SamplingForm, defaultsOf} from '../sampling_form.js';
import {planRun} from './run_plan.js';

const VARIABLE = SAMPLING.filter(({kind}) => kind === 'number');

/** error: a `FormError`, or null. actions: buttons. */
export function RunForm({form, onChange, error, actions, server}) {
  const set = (fields) => onChange({...form, ...fields});
  const text = (name) => ({value: form[name], onInput: (event) => set({[name]: event.target.value})});
  const at = (field) => (error?.field === field ? error.message : '');
  const {vary} = form;
  const change = (i, fields) => set({vary: vary.map((each, k) => (k === i ? {...each, ...fields} : each))});
  const free = VARIABLE.filter(({name}) => !vary.some((each) => each.name === name));
  const general = at('product') || at('settings');

  return html`<form class="run-form stack" onSubmit=${(event) => event.preventDefault()}>
    <${Field} label="Send prompt as"><select ...${text('kind')}>
      <option value="chat">a chat message</option><option value="text">plain text to continue</option></select><//>
    ${form.kind === 'chat' && html`<${Field} label="System prompt" error=${at('system')}>
      <textarea rows="2" class="short" ...${text('system')} /><//>`}
    <${Field} label="Prompt" error=${at('prompt')}
      help=${form.table.trim() && '{city} is replaced by the value of column city. Double all other braces.'}>
      <textarea rows="5" ...${text('prompt')} /><//>
    <details open=${Boolean(form.table)}><summary>Table of variables</summary>
      <${Field} label="Rows" error=${at('table')}
        help="Paste spreadsheet cells or CSV. The first line contains the column names; each further row is a prompt.">
        <textarea rows="4" class="mono" wrap="off" spellcheck=${false} ...${text('table')} /><//></details>
    <fieldset><legend>Vary</legend>
      ${vary.map(({name, values}, i) => html`<div class="varied" key=${i}>
        <select aria-label="Setting" value=${name} onChange=${(event) => change(i, {name: event.target.value})}>
          ${VARIABLE.filter((each) => each.name === name || free.includes(each))
            .map((each) => html`<option value=${each.name}>${each.label}</option>`)}</select>
        <input aria-label=${`Values of ${name}`} value=${values} placeholder="0..1.5 x 4" spellcheck=${false}
          aria-invalid=${Boolean(at(`vary${i}`))} onInput=${(event) => change(i, {values: event.target.value})} />
        <${Button} kind="quiet" icon="close" label=${`Do not vary ${name}`}
          onClick=${() => set({vary: vary.filter((_, k) => k !== i)})} />
        ${at(`vary${i}`) && html`<p class="help field-error" role="alert">${at(`vary${i}`)}</p>`}</div>`)}
      <${Button} kind="quiet" icon="plus"
        onClick=${() => set({vary: [...vary, {name: free[0].name, values: ''}]})}>Vary another setting<//>
      <${Field} label="Samples of each" error=${at('samples')}>
        <input type="number" min="1" max="64" ...${text('samples')} /><//></fieldset>
    <details><summary>Settings of all cells</summary>
      <${SamplingForm} values=${form.settings} onChange=${(settings) => set({settings})} defaults=${defaultsOf(server)} /></details>
    <div class="run-actions">${general && html`<${Notice} kind="error">${general}<//>`}
      <div class="row">${actions}<span class="muted small">${cellCount(form)}</span></div></div></form>`;
}

/** How many cells the form makes; nothing while it is incomplete. */
function cellCount(form) {
  try {
    return plural(planRun(form).labels.length, 'cell');
  } catch {
    return '';
  }
}
