// @ts-check
// The Chat tab.
import {Button, EmptyState, Menu, html, lazy, toast, useEffect, useLayoutEffect, useReducer, useState} from '../components.js';
import {chatState as state} from './chat_state.js';
import {Composer} from './composer.js';
import {add, choose, lastId, pathOf, remove, requestMessages} from './conversation.js';
import {Sidebar, exportItems} from './sidebar.js';

// What the first view does not need is loaded after it, so that it is there soon.
const AFTER_MS = 300;
const Messages = lazy(() => import('./messages.js').then((module) => module.Messages), ({conversation}) => html`
  <div class="messages"><div class="messages-inner">${pathOf(conversation).map(({id, role, content}) => html`
    <article key=${id} class=${`message ${role}`}><div class="message-body">
      <p class="plain">${content || (role === 'assistant' && '…')}</p></div></article>`)}</div></div>`);
const Examples = lazy(() => import('./examples.js').then((module) => module.Examples));
const Rename = lazy(() => import('./rename_dialog.js').then((module) => module.Rename));
const SettingsDialog = lazy(() => import('./settings_dialog.js').then((module) => module.SettingsDialog));

const ACTIONS = {
  choose: (message, step) => state.update(choose(state.current, message, step)),
  continue: (message) => state.continue(message),
  regenerate: (message) => state.answer(message.parent),
  sendResults: (id, results) => state.sendResults(id, results),
  edit(message, text) {
    if (message.role === 'user') return state.send(text, message.media, message.parent);
    return state.update(add(state.current, message.parent, {role: 'assistant', content: text, finish: 'stop'}));
  },
  remove(message) {
    const before = state.current;
    state.update(remove(before, message));
    toast('Deleted this message and those after it.', 'info', {label: 'Undo', act: () => state.update(before)});
  },
};

function useChatState() {
  const [, update] = useReducer((n) => n + 1, 0);
  useEffect(() => {
    state.load();
    setTimeout(() => Messages.load().then(() => Examples.load()).then(update, () => {}), AFTER_MS);
    return state.subscribe(update);
  }, []);
}

function send(text, media) {
  if (state.isRunning) return false;
  state.send(text, media);
  return true;
}

async function erase(conversation) {
  if (!await state.erase(conversation.id)) return;
  toast('Conversation deleted.', 'info', {label: 'Undo', act: () => state.import([conversation])});
}

/** Whether a question about tokens neither loads nor wakes a model. */
const isUp = ({health, info: {model}}) => health.status === 'ok' && (model?.status?.value ?? 'loaded') === 'loaded';

/** A conversation as a request, for the tokens of one without an answer: its template and system prompt count. */
function bodyOf({system, tools, ...conversation}) {
  const messages = requestMessages({...conversation, system}, lastId(conversation));
  return {messages, ...(state.model && {model: state.model}), ...(tools.trim() && {tools})};
}

/** The tokens of a conversation up to its last answer, as the server counted them. */
function usedBy(conversation) {
  const {stats} = pathOf(conversation).findLast((message) => message.stats?.prompt) ?? {};
  return stats ? stats.prompt + stats.tokens : 0;
}

export function Chat({server, active}) {
  useChatState();
  const [isListOpen, setListOpen] = useState(false);
  const [dialog, setDialog] = useState(null);
  useLayoutEffect(() => { // as soon as the list is shown: an effect comes later
    const onKeyDown = ({key}) => { if (key === 'Escape') setListOpen(false); };
    if (isListOpen) addEventListener('keydown', onKeyDown);
    return () => removeEventListener('keydown', onKeyDown);
  }, [isListOpen]);
  const conversation = state.current;
  state.model = server.info.models?.length > 1 ? server.name : null;
  const isChosen = !conversation.model || conversation.model === server.name;
  const shown = isChosen ? server : {...server, info: {...server.info, props: null}}; // of another model not known
  state.server = shown;
  const isEmpty = pathOf(conversation).length === 0;
  const close = () => setDialog(null);
  return html`<div class="chat">
    <${Sidebar} state=${state} isOpen=${isListOpen} onSelect=${() => setListOpen(false)} />
    ${isListOpen && html`<div class="veil" onClick=${() => setListOpen(false)}></div>`}
    <div class="chat-main">
      <div class="chat-bar">
        <${Button} kind="quiet" icon="menu" label="Show conversations" class="only-narrow"
          aria-expanded=${isListOpen} onClick=${() => setListOpen(!isListOpen)} />
        <h2>${conversation.title || 'New conversation'}</h2>
        <${Button} kind="quiet" icon="settings" label="Conversation settings"
          onClick=${() => setDialog('settings')} />
        <${Menu} label="This conversation" items=${[
          {label: 'Rename and tag …', icon: 'edit', disabled: isEmpty, onSelect: () => setDialog('rename')},
          ...exportItems(() => [conversation], isEmpty, conversation.title, true),
          {label: 'Delete', icon: 'trash', danger: true, disabled: isEmpty, onSelect: () => erase(conversation)},
        ]} />
      </div>
      <div class="shown">${isEmpty ? html`<div class="messages">
          <${EmptyState} title=${server.name ? `Chat with ${server.name}` : 'Chat'}>Write a message below. Several
            conversations can be answered at the same time: they share the batch.${Examples.isLoaded() && html`<${Examples} onSend=${(text) => send(text)} />`}<//></div>`
        : html`<${Messages} key=${conversation.id} conversation=${conversation} actions=${ACTIONS}
          health=${server.health} model=${conversation.model ?? state.model} running=${state.running.get(conversation.id)?.messageId} />`}</div>
      ${shown.info.props?.has_chat_template === false && html`<p class="no-template muted small">This file has no chat template:
        it is a base model, or its template is missing. Messages are sent in ChatML, which it may not know. Use an instruct
        model, or start the server with --chat-template.</p>`}
      <${Composer} conversationId=${conversation.id} isRunning=${state.isRunning} active=${active}
        modalities=${shown.info.props?.modalities} model=${state.model} used=${usedBy(conversation)}
        limit=${isUp(shown) ? shown.info.props?.default_generation_settings?.n_ctx : null} keep=${shown.info.props?.n_keep}
        request=${() => bodyOf(conversation)}
        onSend=${send} onStop=${() => state.stop()} />
    </div>
    ${dialog === 'settings' && html`<${SettingsDialog} conversation=${conversation} server=${shown} onClose=${close}
      onChange=${(fields) => state.update({...state.current, ...fields})} />`}
    ${dialog === 'rename' && html`<${Rename} conversation=${conversation} onChange=${(next) => state.update(next)} onEnd=${close} />`}
  </div>`;
}
