// A run, or one cell of it, as a command, a program, or a batch file: to copy, or to save.
import {Button, CopyButton, Dialog, Field, download, html, useState} from '../components.js';
import {FORMATS, exported} from './export_code.js';

const ORIGIN = new URL('../..', import.meta.url).href.replace(/\/$/, '');

export function ExportDialog({title, asked, server, onClose}) {
  const [id, setId] = useState('curl');
  const {props, model} = server.info;
  const target = {
    origin: ORIGIN, keyed: server.keyed, model: model?.id ?? '',
    maxTokens: props?.default_generation_settings?.n_ctx ?? 4096,
  };
  const {file, type} = FORMATS.find((each) => each.id === id);
  const text = exported(id, asked, target);
  return html`<${Dialog} open wide title=${title} onClose=${onClose} actions=${html`
    <${CopyButton} text=${text}>Copy<//>
    <${Button} icon="download" onClick=${() => download(file, text, type)}>Save ${file}<//>`}>
    <${Field} label="As"><select value=${id} onChange=${(event) => setId(event.target.value)}>
      ${FORMATS.map((each) => html`<option value=${each.id}>${each.label}</option>`)}</select><//>
    ${target.keyed && html`<p class="help">The API key is read from the environment variable CPPBATCH_API_KEY.</p>`}
    <pre class="export-text" tabindex="0" aria-label="The export">${text}</pre>
  <//>`;
}
