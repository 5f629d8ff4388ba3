// @ts-check
// Where conversations are kept: the browser's IndexedDB.
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

export const save = (conversation) => run('readwrite', (store) => store.put(conversation));

export const erase = (id) => run('readwrite', (store) => store.delete(id));

export const eraseAll = () => run('readwrite', (store) => store.clear());
