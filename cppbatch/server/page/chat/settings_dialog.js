// @ts-check
// The settings of a conversation: system prompt, sampling, tools.
import {Button, Dialog, Field, html, useState, useStored} from '../components.js';
import {SamplingForm, defaultsOf} from '../sampling_form.js';

const PRESETS = {
  'Short answers': 'Answer in at most three sentences. Say so if you do not know.',
  Translator: 'Translate each message into English. If it is English, translate it into German. Answer with the translation only.',
  Proofreader: 'Correct spelling, grammar and style of each message. Answer with the corrected text, then list the changes.',
  'Code reviewer': 'Review the code in each message: errors first, then security, then clarity. Quote the lines, and show the better code.',
};

/** Presets of system prompts: some to begin with, and those that the reader has saved in this browser. */
function Presets({system, onChange}) {
  const [own, setOwn] = useStored('presets', {});
  const [name, setName] = useState('');
  const all = {...PRESETS, ...own};
  const chosen = Object.keys(all).find((each) => all[each] === system) ?? '';
  const save = () => {
    setOwn({...own, [name.trim()]: system});
    setName('');
  };
  const remove = () => setOwn(Object.fromEntries(Object.entries(own).filter(([each]) => each !== chosen)));
  return html`<div class="row presets">
    <${Field} label="Preset"><select value=${chosen} onChange=${({target}) => target.value && onChange(all[target.value])}>
      <option value="">${system ? 'none of them' : 'choose one'}</option>
      ${Object.keys(all).map((each) => html`<option value=${each} key=${each}>${each}</option>`)}</select><//>
    ${chosen in own && html`<${Button} onClick=${remove}>Delete preset<//>`}
    ${system.trim() && !chosen && html`<${Field} label="Save as preset"><input placeholder="Name" value=${name}
        onInput=${({target}) => setName(target.value)} /><//>
      <${Button} disabled=${!name.trim()} onClick=${save}>Save<//>`}</div>`;
}

function toolsProblem(tools) {
  try {
    return !tools.trim() || Array.isArray(JSON.parse(tools)) ? '' : 'This must be a list: [ … ].';
  } catch (error) {
    return `This is not valid JSON: ${error.message}`;
  }
}

export function SettingsDialog({conversation, server, onChange, onClose}) {
  const {system, settings, tools, thinking, model} = conversation;
  const {models, props} = server.info;
  return html`<${Dialog} open wide title="Conversation settings" onClose=${onClose}><div class="stack">
    ${(models?.length > 1 || model) && html`<${Field} label="Model">
      <select value=${model ?? ''} onChange=${({target}) => onChange({model: target.value || undefined})}>
        <option value="">the one selected in the page header</option>
        ${(models ?? []).map(({id}) => html`<option value=${id} key=${id}>${id}</option>`)}</select><//>`}
    <${Field} label="System prompt"
      help="Instructions for the model before the first message. Also used for new conversations.">
      <textarea rows="3" value=${system} onInput=${({target}) => onChange({system: target.value})} /><//>
    <${Presets} system=${system} onChange=${(text) => onChange({system: text})} />
    ${props?.chat_template?.includes('enable_thinking') && html`<${Field} label="Thinking"
      help="Whether the model reasons before it answers.">
      <select value=${thinking} onChange=${({target}) => onChange({thinking: target.value})}>
        <option value="auto">server default</option><option>on</option><option>off</option></select><//>`}
    <${SamplingForm} values=${settings} defaults=${defaultsOf(server)}
      onChange=${(next) => onChange({settings: next})} />
    <details open=${Boolean(tools)}><summary>Tools</summary><${Field} label="Tools, as JSON"
      error=${toolsProblem(tools)} help="A list in OpenAI’s format. The page shows the calls, and you enter the results.">
      <textarea rows="4" class="mono" spellcheck=${false} value=${tools}
        placeholder='[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]'
        onInput=${({target}) => onChange({tools: target.value})} /><//></details>
  </div><//>`;
}
