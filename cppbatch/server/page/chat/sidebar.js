// @ts-check
// The list of conversations.
import {Button, Menu, confirmAction, download, html, toast, useRef} from '../components.js';
import {plural} from '../format.js';
import {fromJson, toJson} from './conversation.js';

const DAY = 86_400_000;

function groupOf({changed}) {
  const days = (new Date().setHours(0, 0, 0, 0) - changed) / DAY;
  if (days <= 0) return 'Today';
  if (days <= 1) return 'Yesterday';
  return days <= 7 ? 'Last 7 days' : 'Older';
}

async function importFiles(state, input) {
  for (const file of input.files) {
    try {
      const conversations = fromJson(await file.text());
      state.import(conversations);
      toast(`${plural(conversations.length, 'conversation')} imported.`);
    } catch (error) {
      toast(`${file.name} could not be imported: ${error.message}`, 'error');
    }
  }
  input.value = '';
}

async function eraseAll(state) {
  const yes = await confirmAction({title: 'Delete all conversations?', action: 'Delete all',
    message: `${plural(state.conversations.length, 'conversation')} will be deleted from this browser. They are not `
      + 'stored anywhere else.'});
  if (yes) state.eraseAll();
}

export function Sidebar({state, isOpen, onSelect}) {
  const file = useRef(null);
  const none = !state.conversations.length;
  const sorted = [...state.conversations].sort((a, b) => b.changed - a.changed);
  let group = '';
  const heading = (conversation) => {
    if (groupOf(conversation) === group) return null;
    group = groupOf(conversation);
    return html`<h3 class="muted small">${group}</h3>`;
  };
  return html`<aside class=${`conversations ${isOpen ? 'open' : ''}`} aria-label="Conversations">
    <div class="row">
      <${Button} icon="plus" class="grow" onClick=${() => { state.create(); onSelect(); }}>New conversation<//>
      <${Menu} label="All conversations" items=${[
        {label: 'Import …', icon: 'upload', onSelect: () => file.current.click()},
        {label: 'Export all', icon: 'download', disabled: none,
          onSelect: () => download('conversations.json', toJson(state.conversations))},
        {label: 'Delete all …', icon: 'trash', danger: true, disabled: none, onSelect: () => eraseAll(state)},
      ]} />
      <input ref=${file} type="file" hidden multiple accept=".json,application/json" aria-label="File to import"
        onChange=${({target}) => importFiles(state, target)} />
    </div>
    ${none && html`<p class="muted small">Conversations are stored only in this browser.</p>`}
    <div class="conversation-list">${sorted.map((conversation) => html`${heading(conversation)}
      <button type="button" key=${conversation.id} class="conversation" title=${conversation.title}
        aria-current=${conversation.id === state.current.id ? 'true' : undefined}
        onClick=${() => { state.select(conversation.id); onSelect(); }}>
        <span>${conversation.title || 'Untitled'}</span>
        ${state.running.has(conversation.id) && html`<span class="pulse" title="generating an answer"></span>`}
      </button>`)}</div>
  </aside>`;
}
