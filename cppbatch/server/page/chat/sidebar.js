// @ts-check
// The list of conversations.
import {Button, Menu, confirmAction, html, useRef, useState} from '../components.js';
import {plural} from '../format.js';
import {isFound} from './conversation.js';

const DAY = 86_400_000;

function groupOf({changed}) {
  const days = (new Date().setHours(0, 0, 0, 0) - changed) / DAY;
  if (days <= 0) return 'Today';
  if (days <= 1) return 'Yesterday';
  return days <= 7 ? 'Last 7 days' : 'Older';
}

const files = () => import('./conversation_files.js');

/** The menu's items that save conversations. isOne: as Markdown too. */
export const exportItems = (conversations, disabled, title, isOne) => [...(isOne ? ['Markdown'] : []), 'JSON', 'Open WebUI', 'llama.cpp']
  .map((format) => ({label: `Export ${isOne ? '' : 'all '}as ${format}`, icon: 'download', disabled,
    onSelect: () => files().then(({save}) => save(format, conversations(), title))}));

async function eraseAll(state) {
  const yes = await confirmAction({title: 'Delete all conversations?', action: 'Delete all',
    message: `${plural(state.conversations.length, 'conversation')} will be deleted from this browser. They are not `
      + 'stored anywhere else.'});
  if (yes) state.eraseAll();
}

export function Sidebar({state, isOpen, onSelect}) {
  const file = useRef(null);
  const none = !state.conversations.length;
  const [search, setSearch] = useState('');
  const found = search.trim() ? state.conversations.filter((each) => isFound(each, search.trim())) : [...state.conversations];
  const sorted = found.sort((a, b) => b.changed - a.changed);
  const choose = async ({target}) => {
    await (await files()).importFiles(state, [...target.files]);
    target.value = '';
  };
  let group = '';
  const heading = (conversation) => {
    if (groupOf(conversation) === group) return null;
    group = groupOf(conversation);
    return html`<h2 class="muted small">${group}</h2>`;
  };
  return html`<aside class=${`conversations ${isOpen ? 'open' : ''}`} aria-label="Conversations">
    <div class="row">
      <${Button} icon="plus" class="grow" onClick=${() => { state.create(); onSelect(); }}>New conversation<//>
      <${Menu} label="All conversations" items=${[
        {label: 'Import …', icon: 'upload', onSelect: () => file.current.click()},
        ...exportItems(() => state.conversations, none, 'conversations', false),
        {label: 'Delete all …', icon: 'trash', danger: true, disabled: none, onSelect: () => eraseAll(state)},
      ]} />
      <input ref=${file} type="file" hidden multiple accept=".json,.jsonl,.zip" aria-label="File to import"
        onChange=${choose} />
    </div>
    ${!none && html`<input type="search" aria-label="Search conversations" placeholder="Search, #tag" value=${search}
      onInput=${({target}) => setSearch(target.value)} />`}
    ${none && html`<p class="muted small">Conversations are stored only in this browser.</p>`}
    ${!none && !found.length && html`<p class="muted small" role="status">No conversation has these words.</p>`}
    <div class="conversation-list">${sorted.map((conversation) => html`${heading(conversation)}
      <button type="button" key=${conversation.id} class="conversation" title=${conversation.title}
        aria-current=${conversation.id === state.current.id ? 'true' : undefined}
        onClick=${() => { state.select(conversation.id); onSelect(); }}>
        <span>${conversation.title || 'Untitled'}${conversation.tags?.map((tag) => html`<small class="muted"> #${tag}</small>`)}</span>
        ${state.running.has(conversation.id) && html`<span class="pulse" title="generating an answer"></span>`}
      </button>`)}</div>
  </aside>`;
}
