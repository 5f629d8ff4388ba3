// @ts-check
// What can be downloaded: a search on the hub, the files of a repository, and whether one fits into memory.
import {request} from '../api.js';
import {Badge, Button, Dialog, Field, Notice, Table, html, useEffect, useState} from '../components.js';
import {bytes, short} from '../format.js';
import {fitText} from './downloads.js';

const REPOSITORY = /^[\w.-]+\/[\w.-]+$/;

const pathOf = (repository) => `/models/hub/${repository.split('/').map(encodeURIComponent).join('/')}`;

/** The first answer is asked for by itself, of the default file; for others a button asks: the start of each is read. */
function Fit({repository, file, isFirst}) {
  const [answer, setAnswer] = useState(null);
  const ask = async () => {
    setAnswer('…');
    setAnswer(await request(`${pathOf(repository)}?fit=${encodeURIComponent(file)}`)
      .then(({fit}) => fitText(fit), (error) => error.message));
  };
  useEffect(() => { if (isFirst) ask(); }, []);
  return answer ?? html`<${Button} label=${`Whether ${file} fits into memory`} onClick=${ask}>Check<//>`;
}

function Files({repository, onBack, onDownload}) {
  const [found, setFound] = useState(null);
  const [error, setError] = useState(null);
  useEffect(() => { request(pathOf(repository)).then(setFound, setError); }, []);
  const isTooLarge = ({size}) => size > found.free_disk;
  const columns = [
    {key: 'file', label: 'File', render: ({file, weights, size, default: isDefault, here}) => html`
      <span title=${file}>${weights.toUpperCase() || file} · ${bytes(size)}</span> ${isDefault && html`<${Badge}>default<//>`}
      ${here && html`<${Badge} kind="ok">downloaded<//>`}${weights && html`<small>${file}</small>`}`},
    {key: 'fit', label: 'Memory', render: (each) => html`<${Fit} repository=${repository} file=${each.file} isFirst=${each.default} />`},
    {key: 'action', label: 'Action', render: (each) => !each.here && html`<${Button} label=${`Download ${each.file}`}
      disabled=${isTooLarge(each)} onClick=${() => onDownload(each.model)}>${isTooLarge(each) ? 'Disk too small' : 'Download'}<//>`},
  ];
  return html`<div class="row"><${Button} kind="quiet" icon="left" label="Back to the search" onClick=${onBack} />
      <strong class="grow">${repository}</strong></div>
    ${error && html`<${Notice} kind="error">${error.message}<//>`}
    ${!found && !error && html`<p class="muted" role="status">Reading the list of files …</p>`}
    ${found && html`<p class="muted small">${bytes(found.free_disk)} of the disk and ${bytes(found.free_memory)} of memory are free.</p>
      <${Table} caption=${`Files of ${repository}`} columns=${columns} rows=${found.data} rowKey=${({file}) => file} />`}`;
}

export function HubDialog({onDownload, onClose}) {
  const [text, setText] = useState('');
  const [found, setFound] = useState(null);
  const [error, setError] = useState(null);
  const [isBusy, setBusy] = useState(false);
  const [repository, setRepository] = useState(null);
  const search = async (event) => {
    event.preventDefault();
    if (REPOSITORY.test(text.trim())) return setRepository(text.trim());
    setBusy(true);
    const [result, failure] = await request(`/models/hub?search=${encodeURIComponent(text.trim())}`)
      .then(({data}) => [data, null], (reason) => [null, reason]);
    setFound(result);
    setError(failure);
    return setBusy(false);
  };
  return html`<${Dialog} open wide title="Download a model" onClose=${onClose}><div class="stack hub">
    ${repository ? html`<${Files} repository=${repository} onBack=${() => setRepository(null)} onDownload=${(model) => {
        onDownload(model);
        onClose();
      }} />` : html`<form onSubmit=${search}>
        <${Field} label="Search on the Hugging Face hub" help="Words of a name, or OWNER/REPO. The server asks the hub and downloads into its models folder.">
          <input type="search" required autofocus value=${text} onInput=${({target}) => setText(target.value)} /><//>
        <div class="row end"><${Button} kind="primary" type="submit" busy=${isBusy} disabled=${isBusy}>${isBusy ? 'Searching …' : 'Search'}<//></div>
      </form>
      ${error && html`<${Notice} kind="error">${error.message}<//>`}
      ${found?.length === 0 && html`<p class="muted" role="status">No repository with GGUF files has this name.</p>`}
      ${found?.length > 0 && html`<ul class="hub-list" aria-label="Repositories">${found.map(({id, downloads, likes}) => html`<li key=${id}>
        <button type="button" class="hub-repository" onClick=${() => setRepository(id)}><strong>${id}</strong>
          <small>${short(downloads)} downloads last month · ${short(likes)} likes</small></button></li>`)}</ul>`}`}
  </div><//>`;
}
