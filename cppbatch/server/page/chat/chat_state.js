// @ts-check
// All conversations, and the answers that are being streamed into them, whichever tab is shown.
import {isAbort} from '../api.js';
import {toast} from '../components.js';
import {requestFields} from '../sampling_form.js';
import {readAnswer} from './answer.js';
import {add, change, lastId, newConversation, requestMessages} from './conversation.js';
import {erase, eraseAll, loadAll, save} from './conversation_store.js';

const SAVE_MS = 2000;
const CURRENT = 'cppbatch.chat.current';

class ChatState {
  conversations = [];
  current = newConversation();
  isLoaded = false;
  #isKept = true;
  /** Of several models, the one for conversations that name none; null: the server has one. */
  model = null;
  /** By the id of a conversation: {controller, messageId} of the answer that is being streamed. */
  running = new Map();
  #listeners = new Set();
  #isScheduled = false;

  subscribe(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  /** Tells listeners once a frame, however many tokens arrive. */
  #notify() {
    if (this.#isScheduled) return;
    this.#isScheduled = true;
    const tell = () => {
      this.#isScheduled = false;
      this.#listeners.forEach((listener) => listener());
    };
    if (document.hidden) setTimeout(tell, 250);
    else requestAnimationFrame(tell);
  }

  async load() {
    if (this.isLoaded) return;
    this.isLoaded = true;
    try {
      this.conversations = await loadAll();
      this.select(sessionStorage.getItem(CURRENT));
    } catch (error) {
      this.#isKept = false;
      toast(`Conversations are not kept: the browser gives no storage (${error.message}).`, 'error');
    }
    this.#notify();
  }

  get isRunning() {
    return this.running.has(this.current.id);
  }

  /** Replaces a conversation. It is kept once it has a message. */
  update(conversation, {keep = true} = {}) {
    if (this.current.id === conversation.id) this.current = conversation;
    if (this.current.id === conversation.id && keep) sessionStorage.setItem(CURRENT, conversation.id);
    const i = this.conversations.findIndex(({id}) => id === conversation.id);
    if (i >= 0) this.conversations = this.conversations.with(i, conversation);
    else if (Object.keys(conversation.messages).length) this.conversations = [conversation, ...this.conversations];
    if (keep && this.#isKept && this.#find(conversation.id)) this.#save(conversation);
    this.#notify();
  }

  #find = (id) => this.conversations.find((conversation) => conversation.id === id);

  #save(conversation) {
    save(conversation).catch((error) => toast(`The conversation could not be kept: ${error.message}`, 'error'));
  }

  select(id) {
    this.current = this.#find(id) ?? this.current;
    sessionStorage.setItem(CURRENT, this.current.id);
    this.#notify();
  }

  /** A new conversation with the settings of the current one. */
  create() {
    const {system, settings, tools, thinking} = this.current;
    this.current = newConversation({system, settings, tools, thinking});
    sessionStorage.removeItem(CURRENT);
    this.#notify();
  }

  import(conversations) {
    conversations.forEach((conversation) => this.update(conversation));
    if (conversations.length) this.select(conversations[0].id);
  }

  async erase(id) {
    this.stop(id);
    this.conversations = this.conversations.filter((conversation) => conversation.id !== id);
    if (this.current.id === id) this.create();
    await erase(id).catch(() => {});
    this.#notify();
  }

  async eraseAll() {
    this.running.forEach((_, id) => this.stop(id));
    this.conversations = [];
    this.create();
    await eraseAll().catch(() => {});
  }

  stop(id = this.current.id) {
    this.running.get(id)?.controller.abort();
  }

  /** Adds a message of the reader below `parent`, and has it answered. */
  send(text, parent = lastId(this.current)) {
    this.update(add(this.current, parent, {role: 'user', content: text}));
    return this.answer(lastId(this.current));
  }

  /** Adds the results of tool calls below a message, and has them answered. results: [{callId, content}] */
  sendResults(parent, results) {
    let conversation = this.current;
    for (const result of results) conversation = add(conversation, lastId(conversation), {role: 'tool', ...result});
    this.update(conversation);
    return this.answer(lastId(conversation));
  }

  /** Streams a new answer below a message. */
  answer(parent) {
    const conversation = add(this.current, parent, {role: 'assistant'});
    this.update(conversation);
    return this.#stream(conversation, conversation.chosen[parent], parent);
  }

  /** Streams the rest of an answer that was cut. */
  continue(message) {
    return this.#stream(this.current, message.id, message.id, {content: message.content, reasoning: message.reasoning});
  }

  async #stream(conversation, messageId, from, begin) {
    const {id} = conversation;
    const controller = new AbortController();
    this.running.set(id, {controller, messageId});
    let savedAt = performance.now();
    const put = (fields, keep) => {
      const now = this.#find(id);
      if (now?.messages[messageId]) this.update(change(now, messageId, fields), {keep});
    };
    put({error: null, finish: null}, false);
    try {
      const body = requestBody({...conversation, model: conversation.model ?? this.model}, from, Boolean(begin));
      await readAnswer(body, {signal: controller.signal, begin, onChange: (fields) => {
        const keep = performance.now() - savedAt > SAVE_MS;
        if (keep) savedAt = performance.now();
        put(fields, keep);
      }});
    } catch (error) {
      if (isAbort(error)) put({finish: 'stopped', progress: null});
      else put({error: {...error, message: error.message}, progress: null});
    } finally {
      this.running.delete(id);
      put({}, true);
      this.#notify();
    }
  }
}

/** Throws SyntaxError if the tools or the JSON schema are not JSON. */
function requestBody(conversation, from, isContinued) {
  const {settings, tools, thinking, model} = conversation;
  return {
    ...(model && {model}),
    messages: requestMessages(conversation, from),
    ...requestFields(settings),
    ...(tools.trim() && {tools: JSON.parse(tools)}),
    ...(thinking !== 'auto' && {chat_template_kwargs: {enable_thinking: thinking === 'on'}}),
    ...(isContinued && {continue_final_message: true, add_generation_prompt: false}),
  };
}

export const chatState = new ChatState();
