// @ts-check
// The settings of a conversation: system prompt, sampling, tools.
import {Dialog, Field, html} from '../components.js';
import {SamplingForm, defaultsOf} from '../sampling_form.js';

function toolsProblem(tools) {
  try {
    return !tools.trim() || Array.isArray(JSON.parse(tools)) ? '' : 'This must be a list: [ … ].';
  } catch (error) {
    return `This is not JSON: ${error.message}`;
  }
}

export function SettingsDialog({conversation, server, onChange, onClose}) {
  const {system, settings, tools, thinking, model} = conversation;
  const {models, props} = server.info;
  return html`<${Dialog} open wide title="Settings of this conversation" onClose=${onClose}><div class="stack">
    ${(models?.length > 1 || model) && html`<${Field} label="Model">
      <select value=${model ?? ''} onChange=${({target}) => onChange({model: target.value || undefined})}>
        <option value="">the one in the header of the page</option>
        ${(models ?? []).map(({id}) => html`<option value=${id} key=${id}>${id}</option>`)}</select><//>`}
    <${Field} label="System prompt"
      help="What the model is told before the first message. New conversations begin with it.">
      <textarea rows="3" value=${system} onInput=${({target}) => onChange({system: target.value})} /><//>
    ${props?.chat_template?.includes('enable_thinking') && html`<${Field} label="Thinking"
      help="Whether the model thinks before it answers.">
      <select value=${thinking} onChange=${({target}) => onChange({thinking: target.value})}>
        <option value="auto">as the server is set</option><option>on</option><option>off</option></select><//>`}
    <${SamplingForm} values=${settings} defaults=${defaultsOf(server)}
      onChange=${(next) => onChange({settings: next})} />
    <details open=${Boolean(tools)}><summary>Tools</summary><${Field} label="Tools, as JSON"
      error=${toolsProblem(tools)} help="A list as in OpenAI’s API. The page shows the calls; you write their results.">
      <textarea rows="4" class="mono" spellcheck=${false} value=${tools}
        placeholder='[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]'
        onInput=${({target}) => onChange({tools: target.value})} /><//></details>
  </div><//>`;
}
