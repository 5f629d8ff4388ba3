// @ts-check
// Where conversations are kept: the browser's IndexedDB, which all its tabs share.
import {merged, newId} from './conversation.js';

const NAME = 'cppbatch';
const STORE = 'conversations';

let opening = null;

function database() {
  opening ??= new Promise((resolve, reject) => {
    const asked = indexedDB.open(NAME, 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(STORE, {keyPath: 'id'});
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
  return opening;
}

async function run(mode, act) {
  const store = (await database()).transaction(STORE, mode).objectStore(STORE);
  return new Promise((resolve, reject) => {
    const asked = act(store);
    store.transaction.oncomplete = () => resolve(asked.result);
    store.transaction.onerror = () => reject(store.transaction.error);
    store.transaction.onabort = () => reject(store.transaction.error);
  });
}

/** All conversations, the last changed first. */
export const loadAll = async () =>
  (await run('readonly', (store) => store.getAll())).sort((a, b) => b.changed - a.changed);

/** A conversation, undefined if there is none. */
export const load = (id) => run('readonly', (store) => store.get(id));

/**
 * Keeps a conversation. base: as it was when this tab last read or kept it, undefined for a new one. Resolves to it as
 * it is kept, with the changes of other tabs and a new `saved`; to null if another tab has erased it.
 */
export async function save(conversation, base) {
  let kept = null;
  await run('readwrite', (store) => {
    const asked = store.get(conversation.id);
    asked.onsuccess = () => {
      const stored = asked.result;
      if (base && !stored) return;
      const isAlone = !base || stored.saved === base.saved;
      kept = {...(isAlone ? conversation : merged(base, conversation, stored)), saved: newId()};
      store.put(kept);
    };
    return asked;
  });
  return kept;
}

export const erase = (id) => run('readwrite', (store) => store.delete(id));
