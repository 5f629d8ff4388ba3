// @ts-check
// The settings of a conversation: system prompt, sampling, tools.
import {Dialog, Field, html} from '../components.js';
import {SamplingForm, defaultsOf} from '../sampling_form.js';

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
