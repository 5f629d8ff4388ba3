// @ts-check
// All conversations, and the answers that are being streamed into them, whichever tab is shown.
import {isAbort} from '../api.js';
import {toast} from '../components.js';
import {add, change, lastId, merged, newConversation} from './conversation.js';

const STORE = import('./conversation_store.js'); // beside the first rendering
const SAVE_MS = 2000;
const CURRENT = 'cppbatch.chat.current';

const idInHash = () => location.hash.split('/')[1];

/** Tells the page's other browser tabs: {id} is kept or erased; {id, running}: its message is being answered; {stop}: an
 * id; {hello}: tell what is running. */
const OTHERS = new BroadcastChannel('cppbatch.chat');

class ChatState {
  conversations = [];
  current = newConversation();
  isLoaded = false;
  #isKept = true;
  /** Of several models, the one for conversations that name none; null: the server has one. */
  model = null;
  /** As `App` has it, of the model of the current conversation. */
  server = null;
  /** By the id of a conversation: {controller, messageId, isElsewhere} of the answer that is being streamed. */
  running = new Map();
  #listeners = new Set();
  #isScheduled = false;
  /** By id: the conversations as this tab last read or kept them. */
  #kept = new Map();
  /** The ids of conversations that wait to be kept. */
  #waiting = new Set();
  #turns = Promise.resolve();

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

  load() {
    if (this.isLoaded) return;
    this.isLoaded = true;
    OTHERS.onmessage = ({data}) => this.#hear(data);
    OTHERS.postMessage({hello: true});
    addEventListener('pagehide', () => this.#own.forEach(([id]) => OTHERS.postMessage({id, running: null})));
    this.#turn(async (store) => {
      const loaded = await store.loadAll();
      loaded.forEach((each) => this.#kept.set(each.id, each));
      this.conversations = [...this.conversations, ...loaded];
      addEventListener('hashchange', () => { if (this.#find(idInHash())) this.select(idInHash()); });
      this.select(this.#find(idInHash()) ? idInHash() : sessionStorage.getItem(CURRENT));
    }).catch((error) => {
      this.#isKept = false;
      toast(`Conversations are not saved: browser storage is unavailable (${error.message}).`, 'error');
    });
  }

  /** Calls `act(store)` after all that were given before. */
  #turn(act) {
    const turn = this.#turns.then(async () => act(await STORE));
    this.#turns = turn.catch(() => {});
    return turn;
  }

  get isRunning() {
    return this.running.has(this.current.id);
  }

  get #own() {
    return [...this.running].filter(([, {isElsewhere}]) => !isElsewhere);
  }

  /** Replaces a conversation. It is kept once it has a message. */
  update(conversation, {keep = true} = {}) {
    if (this.#find(conversation.id) || Object.keys(conversation.messages).length) this.#put(conversation);
    else if (this.current.id === conversation.id) this.current = conversation;
    if (this.current.id === conversation.id && keep) this.#address(conversation.id);
    if (keep && this.#find(conversation.id)) this.#save(conversation.id);
    this.#notify();
  }

  #find = (id) => this.conversations.find((conversation) => conversation.id === id);

  #put(conversation) {
    if (this.current.id === conversation.id) this.current = conversation;
    const i = this.conversations.findIndex(({id}) => id === conversation.id);
    this.conversations = i < 0 ? [conversation, ...this.conversations] : this.conversations.with(i, conversation);
    this.#notify();
  }

  #drop(id) {
    this.#kept.delete(id);
    this.conversations = this.conversations.filter((conversation) => conversation.id !== id);
    if (this.current.id === id) this.create();
    this.#notify();
  }

  /** Keeps a conversation as it is then, with what other tabs have changed. */
  async #save(id) {
    if (!this.#isKept || this.#waiting.has(id)) return;
    this.#waiting.add(id);
    await this.#turn(async (store) => {
      this.#waiting.delete(id);
      const ours = this.#find(id);
      if (!ours) return;
      const kept = await store.save(ours, this.#kept.get(id));
      OTHERS.postMessage({id});
      if (this.#find(id)) this.#take(id, ours, kept);
    }).catch((error) => toast(`The conversation could not be saved: ${error.message}`, 'error'));
  }

  /** Takes over what is kept of a conversation; null: it is erased. base: what it was before. */
  #take(id, base, kept) {
    const now = this.#find(id);
    if (!kept) return this.#drop(id);
    this.#kept.set(id, kept);
    return this.#put(now && now !== base ? merged(base, now, kept) : kept);
  }

  #hear({id, running, stop, hello}) {
    if (hello) this.#own.forEach(([each, {messageId}]) => OTHERS.postMessage({id: each, running: messageId}));
    else if (stop) this.#own.forEach(([each]) => { if (each === stop) this.stop(each); });
    else if (running) {
      const controller = {abort: () => OTHERS.postMessage({stop: id})};
      this.running.set(id, {controller, messageId: running, isElsewhere: true});
    } else if (running === null) this.running.delete(id);
    else this.#turn(async (store) => {
      const [kept, base] = [await store.load(id), this.#kept.get(id)];
      if (base ? kept?.saved !== base.saved : kept && !this.#find(id)) this.#take(id, base, kept);
    });
    this.#notify();
  }

  select(id) {
    this.current = this.#find(id) ?? this.current;
    this.#address(this.current.id);
    this.#notify();
  }

  /** Puts the current conversation into the address of this tab, for reloads, bookmarks and other tabs. '': a new one. */
  #address(id) {
    const isKept = this.#find(id);
    if (isKept) sessionStorage.setItem(CURRENT, id);
    else sessionStorage.removeItem(CURRENT);
    if (/^(#chat(\/.*)?)?$/.test(location.hash)) history.replaceState(null, '', isKept ? `#chat/${id}` : '#chat');
  }

  /** A new conversation with the settings of the current one. */
  create() {
    const {system, settings, tools, thinking} = this.current;
    this.current = newConversation({system, settings, tools, thinking});
    this.#address('');
    this.#notify();
  }

  import(conversations) {
    conversations.forEach((conversation) => this.update(conversation));
    if (conversations.length) this.select(conversations[0].id);
  }

  /** Resolves to whether the conversation is gone, also from the browser's storage: only then it leaves the list. */
  erase(id) {
    this.stop(id);
    return this.#turn(async (store) => {
      if (this.#isKept) await store.erase(id);
      this.stop(id); // an answer that began meanwhile
      this.#drop(id);
      OTHERS.postMessage({id});
      return true;
    }).catch((error) => {
      toast(`The conversation could not be deleted: ${error.message}`, 'error');
      return false;
    });
  }

  eraseAll() {
    this.conversations.forEach(({id}) => this.erase(id));
  }

  stop(id = this.current.id) {
    this.running.get(id)?.controller.abort();
  }

  /** Adds a message of the reader below `parent`, and has it answered. */
  send(text, media, parent = lastId(this.current)) {
    this.update(add(this.current, parent, {role: 'user', content: text, ...(media?.length && {media})}));
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
    OTHERS.postMessage({id, running: messageId});
    let savedAt = performance.now();
    const put = (fields, keep) => {
      const now = this.#find(id);
      if (now?.messages[messageId]) this.update(change(now, messageId, fields), {keep});
    };
    put({error: null, finish: null}, false);
    try {
      const {readAnswer, requestBody} = await import('./answer.js');
      const body = requestBody({...conversation, model: conversation.model ?? this.model}, from, Boolean(begin), this.server);
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
      await this.#turns;
      OTHERS.postMessage({id, running: null});
      this.#notify();
    }
  }
}

export const chatState = new ChatState();
