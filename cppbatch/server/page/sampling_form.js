// @ts-check
// The sampling settings: their names in the API, ranges, and what they mean.
//
//   SAMPLING                      [{name, label, help, kind, range: [min, max], step, more}], in the order of the form.
//                                 kind: 'number' | 'lines' | 'json'; more: shown below "More settings"
//   SamplingForm {values, onChange(values), defaults, names}   names: only these settings
//   defaultsOf(server)            the server's own values by name, from GET /props; shown where a field is empty
//   DEFAULT_MAX_TOKENS            of answers that nobody limits, so that a model that repeats itself comes to an end
//   requestFields(values)         the fields of a request: settings that are set, as the API takes them
import {Button, Field, html} from './components.js';
import {PARAMS} from './sampling_params.js'; // made by the server (web_page.py): `range`, `help` of its declarations

/** @typedef {{name: string, label: string, help: string, kind: string, range?: number[], step?: number,
 * more?: boolean}} Setting */

export const DEFAULT_MAX_TOKENS = 4096;

/** @type {Setting[]} */
export const SAMPLING = [
  {name: 'temperature', label: 'Temperature', step: 0.1,
    help: '0 always picks the most likely token. Higher values pick less likely tokens more often.'},
  {name: 'max_tokens', label: 'Maximum tokens', range: [1, 2147483647], step: 1,
    help: 'The answer is cut off after this many tokens. Empty: 4,096 or the server’s limit in a chat, otherwise until the '
      + 'context is full.'},
  {name: 'seed', label: 'Seed', range: [0, Number.MAX_SAFE_INTEGER], step: 1,
    help: 'The same seed with the same prompt gives the same text. Empty: a random seed for each answer.'},
  {name: 'top_k', label: 'Top-k', step: 1},
  {name: 'top_p', label: 'Top-p', step: 0.01},
  {name: 'min_p', label: 'Min-p', step: 0.01},
  {name: 'stop', label: 'Stop strings', kind: 'lines',
    help: 'The answer ends before any of these strings, one per line.'},
  {name: 'repetition_penalty', label: 'Repetition penalty', step: 0.05, more: true,
    help: 'Values above 1 make recently used tokens less likely. 1: off.'},
  {name: 'presence_penalty', label: 'Presence penalty', step: 0.1, more: true},
  {name: 'frequency_penalty', label: 'Frequency penalty', step: 0.1, more: true},
  {name: 'dry_multiplier', label: 'DRY multiplier', step: 0.1, more: true,
    help: 'Penalises repeated sequences of tokens, longer ones more. 0: off; a typical value is 0.8.'},
  {name: 'xtc_probability', label: 'XTC probability', step: 0.05, more: true,
    help: 'How often the most likely tokens are excluded when several are likely. 0: never.'},
  {name: 'typical_p', label: 'Typical-p', step: 0.01, more: true,
    help: 'Sample only from tokens about as surprising as expected. 1: all.'},
  {name: 'top_n_sigma', label: 'Top-nσ', step: 0.1, more: true},
  {name: 'json_schema', label: 'JSON schema', kind: 'json', more: true,
    help: 'Constrain the answer to JSON with this schema, such as {"type": "object"}.'},
].map((setting) => ({kind: 'number', ...PARAMS[setting.name], ...setting}));

const PROPS_NAMES = {repetition_penalty: 'repeat_penalty'};

export function defaultsOf(server) {
  const params = server.info.props?.default_generation_settings?.params ?? {};
  const values = Object.fromEntries(SAMPLING.map(({name}) => [name, params[PROPS_NAMES[name] ?? name]]));
  return {...values, seed: undefined, max_tokens: params.max_tokens >= 0 ? params.max_tokens : undefined};
}

const isSet = (value) => value !== undefined && value !== null && value !== '';

/** Without numbers out of range. Raises SyntaxError for a schema that is not JSON. */
export function requestFields(values) {
  const fields = {};
  for (const setting of SAMPLING) {
    const {name, kind} = setting;
    const value = values[name];
    if (!isSet(value) || (kind !== 'json' && problem(setting, value))) continue;
    if (kind === 'lines') fields[name] = value.split('\n').filter(Boolean);
    else if (kind === 'json') fields[name] = JSON.parse(value);
    else fields[name] = value;
  }
  return fields;
}

function problem({kind, range: [min, max] = []}, value) {
  if (!isSet(value) || kind === 'lines') return '';
  if (kind !== 'json') return value < min || value > max ? `It must be from ${min} to ${max}; the value is ignored.` : '';
  try {
    JSON.parse(value);
    return '';
  } catch (error) {
    return `This is not valid JSON: ${error.message}`;
  }
}

function Setting({setting, value, fallback, onChange}) {
  const {name, label, help, kind, range: [min, max] = [], step} = setting;
  const isText = kind === 'lines' || kind === 'json';
  const onInput = ({target}) => {
    if (isText) return onChange(target.value);
    return onChange(Number.isFinite(target.valueAsNumber) ? target.valueAsNumber : undefined);
  };
  const input = isText
    ? html`<textarea rows="2" spellcheck=${false} class=${kind === 'json' ? 'mono' : ''} value=${value ?? ''}
      onInput=${onInput} />`
    : html`<input type="number" name=${name} min=${min} max=${max} step=${step}
      inputmode="decimal" value=${value ?? ''} placeholder=${isSet(fallback) ? `${+Number(fallback).toFixed(4)}` : ''}
      onInput=${onInput} />`;
  return html`<${Field} label=${label} help=${help} error=${problem(setting, value)}>${input}<//>`;
}

export function SamplingForm({values, onChange, defaults = {}, names}) {
  const shown = SAMPLING.filter(({name}) => !names || names.includes(name));
  const fields = (settings) => html`<div class="settings-grid">${settings.map((setting) => html`<${Setting}
    key=${setting.name} setting=${setting} value=${values[setting.name]} fallback=${defaults[setting.name]}
    onChange=${(value) => onChange({...values, [setting.name]: value})} />`)}</div>`;
  const more = shown.filter((setting) => setting.more);
  return html`<div class="stack">
    ${fields(shown.filter((setting) => !setting.more))}
    ${more.length > 0 && html`<details open=${more.some(({name}) => isSet(values[name]))}>
      <summary>More settings</summary>${fields(more)}</details>`}
    <div class="row"><${Button} onClick=${() => onChange({})} disabled=${!Object.values(values).some(isSet)}
      >Reset to server settings<//></div>
  </div>`;
}
