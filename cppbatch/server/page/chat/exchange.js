// @ts-check
// Conversations as files: this page's own, and those of Open WebUI, of llama.cpp's page, and with OpenAI's `messages`. No DOM.
//
//   EXPORTS                       [{label, name(base), type, write(conversations)}]
//   toMarkdown(conversation)
//   readFile(file) -> conversations   throws Error with what is wrong
//
// Trees of messages are kept in all formats but OpenAI's. Tool calls and their results become text for Open WebUI, which has
// no messages for them.
import {AUDIO_URL, ROOT, add, fenced, lastId, newConversation, newId, pathOf, versionsOf} from './conversation.js';

const FORMAT = 'cppbatch-chat';

// --- written ---------------------------------------------------------------------------------------------------------

export function toMarkdown(conversation) {
  const names = {user: 'You', assistant: 'Assistant', tool: 'Tool result'};
  const part = (message) => [
    `## ${names[message.role]}`,
    ...(message.media ?? []).map((medium) => (medium.kind === 'text' ? fenced(medium) : `(${medium.kind}: ${medium.name})`)),
    ...(message.reasoning ? [`> ${message.reasoning.trim().replaceAll('\n', '\n> ')}`] : []),
    ...(message.content ? [message.content.trim()] : []),
    ...callsAsText(message.calls),
  ].join('\n\n');
  const system = conversation.system.trim() ? [`## System\n\n${conversation.system.trim()}`] : [];
  return `${[`# ${conversation.title}`, ...system, ...pathOf(conversation).map(part)].join('\n\n')}\n`;
}

const callsAsText = (calls) =>
  (calls ?? []).map(({name, args}) => `\`\`\`json\n${JSON.stringify({name, arguments: args})}\n\`\`\``);

const toJson = (conversations) => JSON.stringify({format: FORMAT, version: 1, conversations}, null, 1);

const inSeconds = (ms) => Math.floor(ms / 1000);
const childrenOf = (conversation, id) => versionsOf(conversation, id).map((message) => message.id);
const parentOf = ({parent}, none) => (parent === ROOT ? none : parent);

/** A list of chats, as Open WebUI exports them. */
function toOpenWebUi(conversations) {
  return JSON.stringify(conversations.map((conversation) => {
    const {id, title, tags = [], created, changed, system, settings} = conversation;
    const messages = Object.fromEntries(Object.values(conversation.messages).map((message) => [message.id, {
      id: message.id, parentId: parentOf(message, null), childrenIds: childrenOf(conversation, message.id),
      role: message.role === 'tool' ? 'user' : message.role, timestamp: inSeconds(created),
      content: [...(message.reasoning ? [thoughtsOf(message.reasoning)] : []), message.content, ...callsAsText(message.calls)]
        .filter(Boolean).join('\n\n'),
      ...(message.role === 'assistant' && {done: true}),
      ...(message.media?.length && {files: message.media.map(({kind, name, url, text}) => (kind === 'text'
        ? {type: 'file', name, file: {filename: name, data: {content: text}}} : {type: kind, name, url}))}),
    }]));
    const last = pathOf(conversation).at(-1)?.id ?? null;
    const chat = {
      id, title, tags, models: [], timestamp: created, params: {...(system && {system}), ...openWebUiParams(settings)},
      history: {messages, currentId: last}, messages: pathOf(conversation).map((message) => messages[message.id]),
    };
    return {id, title, chat, created_at: inSeconds(created), updated_at: inSeconds(changed), meta: {tags}, pinned: false, archived: false};
  }), null, 1);
}

const SAME_PARAMS = ['temperature', 'top_k', 'top_p', 'min_p', 'max_tokens', 'seed', 'frequency_penalty', 'presence_penalty'];
const openWebUiParams = (settings) => Object.fromEntries(SAME_PARAMS.filter((name) => settings[name] !== undefined)
  .map((name) => [name, settings[name]]));
const thoughtsOf = (text) => `<details type="reasoning" done="true">\n<summary>Thoughts</summary>\n${
  text.trim().split('\n').map((line) => `> ${line}`).join('\n')}\n</details>`;
const THOUGHTS = /<details type="reasoning"[^>]*>\n?<summary>[^<]*<\/summary>\n?([^]*?)\n?<\/details>\s*/;

/** JSON Lines of llama.cpp's page: a line for each conversation, followed by its messages. */
function toLlamaCpp(conversations) {
  const lines = conversations.flatMap((conversation) => {
    const {id: convId, title, created, changed, system} = conversation;
    const root = {id: newId(), convId, type: 'root', role: 'system', content: '', parent: null, timestamp: created};
    const first = system.trim() ? {...root, id: newId(), type: 'system', content: system.trim(), parent: root.id} : root;
    const top = childrenOf(conversation, ROOT);
    const heads = first === root ? [{...root, children: top}]
      : [{...root, children: [first.id]}, {...first, children: top}];
    const messages = Object.values(conversation.messages).map((message, i) => ({
      id: message.id, convId, type: 'text', role: message.role, content: message.content, timestamp: created + i,
      parent: parentOf(message, first.id), children: childrenOf(conversation, message.id),
      ...(message.reasoning && {reasoningContent: message.reasoning}),
      ...(message.callId && {toolCallId: message.callId}),
      ...(message.calls?.length && {toolCalls: message.calls.map(({id, name, args}) =>
        ({id, type: 'function', function: {name, arguments: args}}))}),
      ...(message.media?.length && {extra: message.media.map(extraOf)}),
    }));
    const session = {harness: 'cppbatch', type: 'session', id: convId, name: title, lastModified: changed,
      currNode: pathOf(conversation).at(-1)?.id ?? first.id};
    return [session, ...[...heads, ...messages].map((message) => ({message, type: 'message'}))];
  });
  return lines.map((line) => JSON.stringify(line)).join('\n');
}

function extraOf({kind, name, url, text}) {
  if (kind === 'text') return {type: 'TEXT', name, content: text};
  if (kind === 'image') return {type: 'IMAGE', name, base64Url: url};
  const [, mimeType, base64Data] = /^data:([^;]+);base64,(.*)$/s.exec(url);
  return {type: 'AUDIO', name, mimeType, base64Data};
}

export const EXPORTS = [
  {label: 'JSON', name: (base) => `${base}.json`, type: 'application/json', write: toJson},
  {label: 'Open WebUI', name: (base) => `${base}-open-webui.json`, type: 'application/json', write: toOpenWebUi},
  {label: 'llama.cpp', name: (base) => `${base}-llama.cpp.jsonl`, type: 'application/jsonl', write: toLlamaCpp},
];

// --- read ------------------------------------------------------------------------------------------------------------

export async function readFile(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  const texts = bytes[0] === 0x50 && bytes[1] === 0x4b ? await unzipped(bytes) : [new TextDecoder().decode(bytes)];
  return texts.flatMap(fromText);
}

function fromText(text) {
  let read;
  try {
    read = JSON.parse(text);
  } catch (error) {
    const lines = text.split('\n').filter((line) => line.trim());
    if (lines.length < 2 || !lines[0].trim().endsWith('}')) throw error;
    return fromSessions(lines.map((line) => JSON.parse(line)));
  }
  const all = [read].flat();
  if (read?.type === 'session') return fromSessions([read]);
  if (all.length && all.every((one) => one?.conv && Array.isArray(one.messages))) return all.map(fromLlamaCpp);
  if (all.length && all.every((one) => (one?.chat ?? one)?.history?.messages)) return all.map(fromOpenWebUi);
  if (Array.isArray(read?.messages)) return [fromMessages(read.messages)];
  if (read?.format !== FORMAT || !Array.isArray(read.conversations)) {
    throw new Error('The file contains neither conversations of this page, Open WebUI or llama.cpp, nor a list of messages.');
  }
  return read.conversations.map((one) => check({...newConversation(), ...one}));
}

const DAMAGED = 'A conversation in the file is damaged.';

function check(conversation) {
  const {title, system, tags} = conversation;
  if (typeof title !== 'string' || typeof system !== 'string' || !Array.isArray(tags) || !isTree(conversation)) throw new Error(DAMAGED);
  return conversation;
}

const isMedium = ({kind, name, url, text}) => typeof name === 'string'
  && (kind === 'text' ? typeof text === 'string' : kind === 'image' ? url.startsWith('data:image/') : kind === 'audio' && AUDIO_URL.test(url));

const isTree = ({messages, chosen}) => Object.entries(messages).every(([id, message]) => message.id === id
  && typeof message.content === 'string' && (message.media ?? []).every(isMedium) && (message.parent === ROOT || message.parent in messages))
  && Object.entries(chosen).every(([parent, id]) => messages[id]?.parent === parent);

/** A conversation of a tree. nodes: [{id, parent, ...fields}]; system messages become the system prompt. */
function fromTree(nodes, currentId, fields) {
  const byId = new Map(nodes.map((node) => [node.id, node]));
  const isLeftOut = ({role, isRoot}) => isRoot || role === 'system';
  const above = (id, left = nodes.length) => {
    const node = byId.get(id);
    if (!node || !left) return ROOT;
    return isLeftOut(node) ? above(node.parent, left - 1) : id;
  };
  const messages = {};
  const chosen = {};
  for (const {id, parent, isRoot, role, content, ...rest} of nodes) {
    if (isLeftOut({role, isRoot})) continue;
    if (!['user', 'assistant', 'tool'].includes(role) || typeof content !== 'string') throw new Error(DAMAGED);
    messages[id] = {id, parent: above(parent), role, content, ...(role === 'assistant' && {finish: 'stop'}),
      ...Object.fromEntries(Object.entries(rest).filter(([, value]) => value && (!Array.isArray(value) || value.length)))};
    chosen[messages[id].parent] = id;
  }
  let at = above(currentId);
  for (let left = nodes.length; at !== ROOT && left; left--) {
    chosen[messages[at].parent] = at;
    at = messages[at].parent;
  }
  const system = nodes.find((node) => node.role === 'system' && !node.isRoot)?.content ?? '';
  return check({...newConversation({system}), ...fields, messages, chosen});
}

const textOf = (value) => (typeof value === 'string' ? value : '');

function fromOpenWebUi(entry) {
  const chat = entry.chat ?? entry;
  const {messages, currentId} = chat.history;
  const nodes = Object.values(messages).map(({id, parentId, role, content, files}) => {
    const [thoughts, reasoning] = THOUGHTS.exec(textOf(content)) ?? ['', ''];
    return {id, parent: parentId, role, content: textOf(content).replace(thoughts, ''), reasoning: reasoning.replace(/^> ?/gm, ''),
      media: (files ?? []).map(openWebUiMedium)};
  });
  const params = chat.params ?? {};
  const changed = 1000 * (entry.updated_at ?? 0) || chat.timestamp || Date.now();
  return fromTree(nodes, currentId, {
    id: textOf(entry.id || chat.id) || newId(), title: textOf(entry.title || chat.title), changed, created: 1000 * (entry.created_at ?? 0) || changed,
    tags: [entry.meta?.tags ?? chat.tags ?? []].flat().filter((tag) => typeof tag === 'string'),
    settings: openWebUiParams(params), ...((params.system || chat.system) && {system: textOf(params.system || chat.system)}),
  });
}

/** Files that are in the export; of others only their name. */
function openWebUiMedium({type, name, url, file}) {
  const called = textOf(name || file?.filename) || 'file';
  if (textOf(url).startsWith('data:image/')) return {kind: 'image', name: called, url};
  if (AUDIO_URL.test(textOf(url))) return {kind: 'audio', name: called, url};
  return {kind: 'text', name: called, text: textOf(file?.data?.content) || `(${type ?? 'file'} of Open WebUI, not in its export)`};
}

function fromSessions(records) {
  const found = [];
  for (const {type, message, ...conv} of records) {
    if (type === 'session') found.push({conv, messages: []});
    else if (type === 'message' && found.length) found.at(-1).messages.push(message);
    else if (type === 'message') throw new Error(DAMAGED);
  }
  if (!found.length) throw new Error('The file has no conversation.');
  return found.map(fromLlamaCpp);
}

function fromLlamaCpp({conv, messages}) {
  const nodes = messages.map(({id, parent, type, role, content, reasoningContent, thinking, toolCalls, toolCallId, extra}) => ({
    id, parent, role, content: textOf(content), isRoot: type === 'root', reasoning: reasoningContent || thinking, callId: toolCallId,
    calls: callsOf(toolCalls), media: (extra ?? []).map(llamaCppMedium),
  }));
  const changed = conv.lastModified ?? Date.now();
  return fromTree(nodes, conv.currNode, {id: textOf(conv.id) || newId(), title: textOf(conv.name), changed, created: changed});
}

function callsOf(calls) {
  const all = typeof calls === 'string' && calls ? JSON.parse(calls) : calls || [];
  return all.map(({id, function: called}) => ({id: textOf(id), name: textOf(called?.name), args: textOf(called?.arguments)}));
}

function llamaCppMedium({type, name, content, base64Url, base64Data, mimeType}) {
  if (type === 'IMAGE') return {kind: 'image', name, url: base64Url};
  if (type === 'AUDIO') return {kind: 'audio', name, url: `data:${mimeType};base64,${base64Data}`};
  return {kind: 'text', name, text: textOf(content) || `(${textOf(type).toLowerCase()} of llama.cpp, not imported)`};
}

function fromMessages(messages) {
  let conversation = newConversation();
  for (const {role, content} of messages) {
    const fields = contentOf(content);
    if (role === 'system') conversation = {...conversation, system: fields.content};
    else conversation = add(conversation, lastId(conversation), {role, ...fields});
  }
  return conversation;
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

// --- ZIP -------------------------------------------------------------------------------------------------------------

const [END, ENTRY, STORED, DEFLATED] = [0x06054b50, 0x02014b50, 0, 8];
const MOST_BYTES = 2 ** 28; // of a file in it

/** The texts of the .jsonl and .json files of a ZIP file, in which llama.cpp's page puts several conversations. */
async function unzipped(bytes) {
  const view = new DataView(bytes.buffer);
  let end = bytes.length - 22;
  while (end >= 0 && view.getUint32(end, true) !== END) end--;
  if (end < 0) throw new Error('The ZIP file is damaged.');
  const texts = [];
  let at = view.getUint32(end + 16, true);
  for (let left = view.getUint16(end + 10, true); left; left--) {
    if (view.getUint32(at, true) !== ENTRY) throw new Error('The ZIP file is damaged.');
    const [method, packed, size] = [view.getUint16(at + 10, true), view.getUint32(at + 20, true), view.getUint32(at + 24, true)];
    const [nameLength, extra, comment] = [28, 30, 32].map((place) => view.getUint16(at + place, true));
    const name = new TextDecoder().decode(bytes.subarray(at + 46, at + 46 + nameLength));
    const start = view.getUint32(at + 42, true);
    const data = start + 30 + view.getUint16(start + 26, true) + view.getUint16(start + 28, true);
    if (/\.jsonl?$/i.test(name)) {
      if (size > MOST_BYTES || ![STORED, DEFLATED].includes(method)) throw new Error(`${name} in the ZIP file cannot be read.`);
      const content = new Blob([bytes.subarray(data, data + packed)]).stream();
      const plain = method === DEFLATED ? content.pipeThrough(new DecompressionStream('deflate-raw')) : content;
      texts.push(await new Response(plain).text());
    }
    at += 46 + nameLength + extra + comment;
  }
  if (!texts.length) throw new Error('The ZIP file has no conversations (.jsonl or .json).');
  return texts;
}
