// @ts-check
// A conversation: a tree of messages, of which one path is shown. No DOM, no network. Nothing is changed in place.
//
// {id, title, created, changed, system, settings, tools, thinking, messages: {id: message}, chosen: {parent: child},
//  saved: names this state of it in the browser's storage}
// message: {id, parent, role, content, media: [{kind: 'image' | 'audio', name, url} or {kind: 'text', name, text}], reasoning, calls, callId, stats, finish, error}. parent of the first: 'root'.
// Versions of a message are the children of one parent: an edit or another answer adds one.

export const ROOT = 'root';
export const FORMAT = 'cppbatch-chat';

export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(9)), (b) => b.toString(36)).join('');

/** @param {object} base settings to begin with: system, settings, tools, thinking */
export const newConversation = (base = {}) => ({
  system: '', settings: {}, tools: '', thinking: 'auto', ...base,
  id: newId(), title: '', created: Date.now(), changed: Date.now(), messages: {}, chosen: {},
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

const AUDIO_URL = /^data:audio\/(?:x-)?(\w+);base64,/;

/** An image or audio file as a part of a message, in OpenAI's format. */
function partOf({kind, url}) {
  if (kind === 'image') return {type: 'image_url', image_url: {url}};
  const [start, type] = AUDIO_URL.exec(url);
  const format = {mpeg: 'mp3', wave: 'wav'}[type] ?? type;
  return {type: 'input_audio', input_audio: {data: url.slice(start.length), format}};
}

/** The text and the media of a message's content in OpenAI's format. */
function contentOf(content) {
  if (typeof content === 'string') return {content};
  const texts = [];
  const media = [];
  for (const {type, text, image_url: image, input_audio: audio} of content ?? []) {
    if (type === 'text') texts.push(text);
    else if (image?.url?.startsWith('data:image/')) media.push({kind: 'image', name: 'image', url: image.url});
    else if (audio) media.push({kind: 'audio', name: 'audio', url: `data:audio/${audio.format};base64,${audio.data}`});
    else throw new Error('Only text, and images and audio embedded in the file, can be imported.');
  }
  return {content: texts.join('\n'), media};
}

const isMedium = ({kind, name, url, text}) => typeof name === 'string'
  && (kind === 'text' ? typeof text === 'string' : kind === 'image' ? url.startsWith('data:image/') : kind === 'audio' && AUDIO_URL.test(url));

function titleOf({role, content, media}) {
  const line = role === 'user' ? content.trim().split('\n')[0] || media?.[0]?.name || '' : '';
  return line.length > 60 ? `${line.slice(0, 59).trimEnd()}…` : line;
}

export function toMarkdown(conversation) {
  const names = {user: 'You', assistant: 'Assistant', tool: 'Tool result'};
  const part = ({role, content, media, reasoning, calls}) => [
    `## ${names[role]}`,
    ...(media ?? []).map((medium) => (medium.kind === 'text' ? fenced(medium) : `(${medium.kind}: ${medium.name})`)),
    ...(reasoning ? [`> ${reasoning.trim().replaceAll('\n', '\n> ')}`] : []),
    ...(content ? [content.trim()] : []),
    ...(calls ?? []).map(({name, args}) => `\`\`\`json\n${JSON.stringify({name, arguments: args})}\n\`\`\``),
  ].join('\n\n');
  const system = conversation.system.trim() ? [`## System\n\n${conversation.system.trim()}`] : [];
  return `${[`# ${conversation.title}`, ...system, ...pathOf(conversation).map(part)].join('\n\n')}\n`;
}

export const toJson = (conversations) => JSON.stringify({format: FORMAT, version: 1, conversations}, null, 1);

/** The conversations of an exported file, or of a file with OpenAI's `messages`. Throws Error with what is wrong. */
export function fromJson(text) {
  const read = JSON.parse(text);
  if (Array.isArray(read?.messages)) return [fromMessages(read.messages)];
  if (read?.format !== FORMAT || !Array.isArray(read.conversations)) {
    throw new Error('The file contains neither exported conversations nor a list of messages.');
  }
  return read.conversations.map((one) => {
    const whole = {...newConversation(), ...one};
    if (typeof whole.title !== 'string' || typeof whole.system !== 'string' || !isTree(whole)) {
      throw new Error('A conversation in the file is damaged.');
    }
    return whole;
  });
}

const isTree = ({messages, chosen}) => Object.entries(messages).every(([id, message]) => message.id === id
  && typeof message.content === 'string' && (message.media ?? []).every(isMedium) && (message.parent === ROOT || message.parent in messages))
  && Object.entries(chosen).every(([parent, id]) => messages[id]?.parent === parent);

function fromMessages(messages) {
  let conversation = newConversation();
  for (const {role, content} of messages) {
    const fields = contentOf(content);
    if (role === 'system') conversation = {...conversation, system: fields.content};
    else conversation = add(conversation, lastId(conversation), {role, ...fields});
  }
  return conversation;
}
