// A run, or one cell of it, as a command, a program, or a batch file: to copy, or to save.
import {Button, CopyButton, Dialog, Field, download, html, useState} from '../components.js';
import {FORMATS} from './export_code.js';

const ORIGIN = new URL('../..', import.meta.url).href.replace(/\/$/, '');

export function ExportDialog({title, run, server, onClose}) {
  const [{id, file, type, write}, setFormat] = useState(FORMATS[0]);
  const n_ctx = server.info.props?.default_generation_settings?.n_ctx ?? 4096;
  const text = write(run, {origin: ORIGIN, keyed: server.keyed, n_ctx});
  return html`<${Dialog} open wide title=${title} onClose=${onClose} actions=${html`
    <${CopyButton} text=${text}>Copy<//>
    <${Button} icon="download" onClick=${() => download(file, text, type)}>Save ${file}<//>`}>
    <${Field} label="As"><select value=${id}
      onChange=${({target}) => setFormat(FORMATS.find((each) => each.id === target.value))}>
      ${FORMATS.map((each) => html`<option value=${each.id}>${each.label}</option>`)}</select><//>
    ${server.keyed && html`<p class="help">The API key is read from the environment variable CPPBATCH_API_KEY.</p>`}
    <pre class="export-text" tabindex="0" aria-label="The export">${text}</pre><//>`;
}
