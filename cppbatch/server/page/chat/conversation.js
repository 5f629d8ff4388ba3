// @ts-check
// A conversation: a tree of messages, of which one path is shown. No DOM, no network. Nothing is changed in place.
//
// {id, title, tags, created, changed, system, settings, tools, thinking, messages: {id: message}, chosen: {parent: child},
//  saved: names this state of it in the browser's storage}
// message: {id, parent, role, content, media: [{kind: 'image' | 'audio', name, url} or {kind: 'text', name, text}], reasoning, calls, callId, stats, finish, error}. parent of the first: 'root'.
// Versions of a message are the children of one parent: an edit or another answer adds one.

export const ROOT = 'root';

export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(9)), (b) => b.toString(36)).join('');

/** @param {object} base settings to begin with: system, settings, tools, thinking */
export const newConversation = (base = {}) => ({
  system: '', settings: {}, tools: '', thinking: 'auto', ...base,
  id: newId(), title: '', tags: [], created: Date.now(), changed: Date.now(), messages: {}, chosen: {},
});

export const versionsOf = (conversation, parent) =>
  Object.values(conversation.messages).filter((message) => message.parent === parent);

/** The messages that are shown, from the first to the last. */
export function pathOf(conversation) {
  const path = [];
  for (let id = conversation.chosen[ROOT]; id; id = conversation.chosen[id]) path.push(conversation.messages[id]);
  return path;
}

export const lastId = (conversation) => pathOf(conversation).at(-1)?.id ?? ROOT;

/** With a new message below `parent`, which is shown from now on. */
export function add(conversation, parent, fields) {
  const message = {content: '', ...fields, id: fields.id ?? newId(), parent};
  return {
    ...conversation,
    title: conversation.title || titleOf(message),
    changed: Date.now(),
    messages: {...conversation.messages, [message.id]: message},
    chosen: {...conversation.chosen, [parent]: message.id},
  };
}

export const change = (conversation, id, fields) => ({
  ...conversation,
  messages: {...conversation.messages, [id]: {...conversation.messages[id], ...fields}},
});

/**
 * A conversation with the changes that two browser tabs have made since `base`. What both have changed is as in `ours`;
 * what one has removed is removed, with what follows it.
 */
export function merged(base, ours, theirs) {
  const either = (was, own, other) => Object.fromEntries([...new Set([...Object.keys(other), ...Object.keys(own)])]
    .map((name) => [name, own[name] === was[name] ? other[name] : own[name]])
    .filter(([name, value]) => value !== undefined && !(name in was && !(name in other && name in own))));
  const whole = {
    ...either(base, ours, theirs),
    changed: Math.max(ours.changed, theirs.changed),
    messages: either(base.messages, ours.messages, theirs.messages),
    chosen: either(base.chosen, ours.chosen, theirs.chosen),
  };
  const messages = {};
  const keep = (parent) => versionsOf(whole, parent).forEach((message) => {
    messages[message.id] = message;
    keep(message.id);
  });
  keep(ROOT);
  const chosen = Object.fromEntries(Object.entries(whole.chosen).filter(([, id]) => id in messages));
  for (const {parent, id} of Object.values(messages)) chosen[parent] ??= id;
  return {...whole, messages, chosen};
}

/** Shows the version before (-1) or after (1) a message. */
export function choose(conversation, message, step) {
  const versions = versionsOf(conversation, message.parent);
  const next = versions[versions.findIndex(({id}) => id === message.id) + step];
  return next ? {...conversation, chosen: {...conversation.chosen, [message.parent]: next.id}} : conversation;
}

/** Without a message and what follows it; a version that is left is shown instead. */
export function remove(conversation, message) {
  const messages = {...conversation.messages};
  const chosen = {...conversation.chosen};
  const drop = (id) => {
    versionsOf(conversation, id).forEach((child) => drop(child.id));
    delete messages[id];
    delete chosen[id];
  };
  drop(message.id);
  const left = versionsOf({messages}, message.parent).at(-1);
  if (left) chosen[message.parent] = left.id;
  else delete chosen[message.parent];
  return {...conversation, messages, chosen, changed: Date.now()};
}

/** The messages up to this one as the API takes them. Thoughts of earlier answers are not sent. */
export function requestMessages(conversation, id) {
  const path = [];
  for (let at = conversation.messages[id]; at; at = conversation.messages[at.parent]) path.unshift(at);
  const system = conversation.system.trim() ? [{role: 'system', content: conversation.system}] : [];
  return [...system, ...path.map(requestMessage)];
}

/** A file as a part of a prompt: its name, and its text in a fence that the text does not end. */
export function fenced({name, text}) {
  const fence = '`'.repeat(Math.max(3, ...(text.match(/`+/g) ?? []).map((run) => run.length + 1)));
  return `${name}:\n${fence}${/\.(\w+)$/.exec(name)?.[1] ?? ''}\n${text.replace(/\n$/, '')}\n${fence}`;
}

function requestMessage({role, content: written, media: all, calls, callId}) {
  const files = (all ?? []).filter(({kind}) => kind === 'text').map(fenced);
  const media = all?.filter(({kind}) => kind !== 'text');
  const content = [...files, ...(written || !files.length ? [written] : [])].join('\n\n');
  if (media?.length) return {role, content: [...media.map(partOf), ...(content ? [{type: 'text', text: content}] : [])]};
  if (role === 'tool') return {role, content, tool_call_id: callId};
  if (!calls?.length) return {role, content};
  const toolCalls = calls.map(({id, name, args}) => ({id, type: 'function', function: {name, arguments: args}}));
  return {role, content: content || null, tool_calls: toolCalls};
}

export const AUDIO_URL = /^data:audio\/(?:x-)?(\w+);base64,/;

/** An image or audio file as a part of a message, in OpenAI's format. */
function partOf({kind, url}) {
  if (kind === 'image') return {type: 'image_url', image_url: {url}};
  const [start, type] = AUDIO_URL.exec(url);
  const format = {mpeg: 'mp3', wave: 'wav'}[type] ?? type;
  return {type: 'input_audio', input_audio: {data: url.slice(start.length), format}};
}

function titleOf({role, content, media}) {
  const line = role === 'user' ? content.trim().split('\n')[0] || media?.[0]?.name || '' : '';
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line;
}

/** Whether it has all words of a search in its title, system prompt or messages, and the tags among them (#tag). */
export function isFound({title, tags = [], system, messages}, search) {
  const texts = [title, system, ...Object.values(messages).map(({content}) => content)].map((text) => text.toLowerCase());
  return search.toLowerCase().split(/\s+/).every((word) => (word[0] === '#'
    ? tags.some((tag) => `#${tag.toLowerCase()}`.startsWith(word)) : texts.some((text) => text.includes(word))));
}
