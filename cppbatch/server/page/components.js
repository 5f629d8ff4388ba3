// @ts-check
// The components that all tabs share, and Preact with htm (html`...` makes elements; class, not className).
//
//   html, render, Component, useState, useEffect, useLayoutEffect, useRef, useMemo, useCallback, useReducer
//   Button   {kind: 'primary' | 'quiet' | 'danger', icon, label, busy}   label without children: an icon button
//   Icon     {name}                    names: the keys of ICONS
//   Field    {label, help, error, inline}   children: one input, select or textarea; inline for checkboxes
//   Dialog   {open, title, onClose, actions, wide}
//   Menu     {label, icon, items: [{label, icon, onSelect, danger, disabled}], align: 'end'}
//   EmptyState {title, icon, actions}  children: what to do
//   Notice   {kind: 'error' | 'warning' | 'info', onClose}
//   Progress {value, max, label}       without value: busy
//   Table    {columns: [{key, label, align, render(row)}], rows, rowKey, caption, onSelect(row)}
//   CopyButton {text: string | () => string, label}
//   Badge    {kind: 'ok' | 'warning' | 'error' | 'accent'}
//   copyText(text), download(name, content, type), toast(message, kind, action)
//   confirmAction({title, message, action, keep}) -> Promise<boolean>
//   await stylesheet(import.meta.url, 'x.css')  a tab's own rules, loaded before it is shown
//   useStored(name, initial)           state in localStorage, under cppbatch.<name>
//   lazy(import, Before)               a component whose module is loaded when it is first shown, or by its load(); Before
//                                      is shown until then
//   usePolling(load, active, dependencies)  calls load(isEnded), and again after the milliseconds it resolves to
//   useTurns()                         long work in turns, between which the page answers
//   Toasts, Confirm                    rendered once, by app.js
import {
  Component, html, render, useCallback, useEffect, useLayoutEffect, useMemo, useReducer, useRef, useState,
} from './vendor/preact.js';

export {Component, html, render, useCallback, useEffect, useLayoutEffect, useMemo, useReducer, useRef, useState};

const ICONS = {
  plus: 'M8 3v10M3 8h10',
  send: 'M8 13V3M3.5 7.5 8 3l4.5 4.5',
  stop: 'M4.5 4.5h7v7h-7z',
  close: 'M4 4l8 8M12 4l-8 8',
  check: 'M3 8.5 6.5 12 13 4.5',
  copy: 'M6 6V3h7v7h-3M3 6h7v7H3z',
  edit: 'M3 13l.7-3L10.5 3.2l2.3 2.3L6 12.3z',
  trash: 'M3 4.5h10M6.5 4.5V3h3v1.5M4.5 4.5l.6 8.5h5.8l.6-8.5',
  refresh: 'M13 4v3h-3M12.7 7A5 5 0 1 0 13 9.5',
  download: 'M8 3v7M5 7.5 8 10.5l3-3M3 13h10',
  upload: 'M8 10.5v-7M5 6l3-3 3 3M3 13h10',
  attach: 'M13 7.5 7.7 12.8a3.2 3.2 0 0 1-4.5-4.5L8.8 2.7a2.1 2.1 0 0 1 3 3L6.3 11.2a1 1 0 0 1-1.5-1.5L9.6 5',
  more: 'M3.5 8h.01M8 8h.01M12.5 8h.01',
  menu: 'M3 4.5h10M3 8h10M3 11.5h10',
  left: 'M10 3.5 5.5 8l4.5 4.5',
  right: 'M6 3.5 10.5 8 6 12.5',
  down: 'M3.5 6 8 10.5 12.5 6',
  settings: 'M3 5h5M12 5h1M3 11h1M8 11h5M10 3.5v3M6 9.5v3',
  key: 'M5.5 13a2.5 2.5 0 1 0 0-5 2.5 2.5 0 0 0 0 5zM7.3 8.7 13 3M10.5 5.5l2 2',
  theme: 'M8 13.5a5.5 5.5 0 1 0 0-11zM8 13.5a5.5 5.5 0 1 1 0-11',
  alert: 'M8 2.5 14 13H2zM8 6.5v3M8 11.3v.01',
};

export const Icon = ({name}) => html`<svg class="icon" viewBox="0 0 16 16" aria-hidden="true">
  <path d=${ICONS[name]} /></svg>`;

export function Button({kind = '', icon, label, busy, class: extra = '', children, ...props}) {
  const alone = icon && !children;
  return html`<button type="button" class=${`button ${kind} ${alone ? 'alone' : ''} ${extra}`} aria-label=${label}
    title=${alone ? label : undefined} aria-busy=${busy || undefined} ...${props}>
    ${icon && html`<${Icon} name=${icon} />`}${children}</button>`;
}

export const Field = ({label, help, error, inline, children}) => html`<div class=${`field ${inline ? 'inline' : ''}`}>
  <label><span class="field-label">${label}</span>${children}</label>
  ${help && html`<p class="help">${help}</p>`}
  ${error && html`<p class="help field-error" role="alert">${error}</p>`}
</div>`;

export const Dialog = ({open, ...props}) => open && html`<${OpenDialog} ...${props} />`;

function OpenDialog({title, onClose, actions, wide, children}) {
  const ref = useRef(null);
  useLayoutEffect(() => {
    const dialog = ref.current;
    dialog.showModal();
    return () => dialog.close(); // the focus goes back to where it was
  }, []);
  const cancel = (event) => {
    event.preventDefault();
    onClose?.();
  };
  return html`<dialog ref=${ref} class=${wide ? 'wide' : ''} aria-label=${title} onCancel=${cancel}
    onMouseDown=${(event) => event.target === ref.current && onClose?.()}>
    <div class="dialog">
      <header><h2>${title}</h2>
        ${onClose && html`<${Button} kind="quiet" icon="close" label="Close" onClick=${onClose} />`}</header>
      <div class="dialog-body">${children}</div>
      ${actions && html`<footer>${actions}</footer>`}
    </div>
  </dialog>`;
}

export function Menu({label, icon = 'more', items, align = 'end', children, kind = 'quiet'}) {
  const [open, setOpen] = useState(false);
  const ref = useRef(null);
  useEffect(() => {
    if (!open) return undefined;
    ref.current.querySelector('[role=menuitem]:not(:disabled)')?.focus();
    const leave = (event) => { if (!ref.current?.contains(event.target)) setOpen(false); };
    document.addEventListener('pointerdown', leave);
    document.addEventListener('focusin', leave);
    return () => {
      document.removeEventListener('pointerdown', leave);
      document.removeEventListener('focusin', leave);
    };
  }, [open]);
  const close = () => {
    setOpen(false);
    ref.current.querySelector('button').focus();
  };
  const onKeyDown = (event) => {
    if (!open) return;
    const all = [...ref.current.querySelectorAll('[role=menuitem]:not(:disabled)')];
    const at = all.indexOf(document.activeElement);
    const next = {ArrowDown: at + 1, ArrowUp: at - 1 + all.length, Home: 0, End: all.length - 1}[event.key];
    if (event.key === 'Escape') close();
    else if (next !== undefined) all[next % all.length].focus();
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  return html`<div class="menu" ref=${ref} onKeyDown=${onKeyDown}>
    <${Button} kind=${kind} icon=${icon} label=${label} aria-haspopup="menu" aria-expanded=${open}
      onClick=${() => setOpen(!open)}>${children}<//>
    ${open && html`<div class=${`menu-items ${align}`} role="menu" aria-label=${label}>
      ${items.map((item) => html`<button type="button" role="menuitem" class=${item.danger ? 'danger' : ''}
        disabled=${item.disabled} onClick=${() => { close(); item.onSelect(); }}>
        ${item.icon && html`<${Icon} name=${item.icon} />`}${item.label}</button>`)}
    </div>`}
  </div>`;
}

export const EmptyState = ({title, icon, actions, children}) => html`<div class="empty">
  ${icon && html`<${Icon} name=${icon} />`}
  <h2>${title}</h2><div>${children}</div>
  ${actions && html`<div class="row">${actions}</div>`}
</div>`;

export const Notice = ({kind = 'info', onClose, children}) => html`<div class=${`notice ${kind}`}
  role=${kind === 'error' ? 'alert' : 'status'}><div>${children}</div>
  ${onClose && html`<${Button} kind="quiet" icon="close" label="Dismiss" onClick=${onClose} />`}</div>`;

export const Badge = ({kind = '', children}) => html`<span class=${`badge ${kind}`}>${children}</span>`;

export const Progress = ({value, max = 1, label}) =>
  html`<progress value=${value} max=${max} aria-label=${label}></progress>`;

export const Table = ({columns, rows, rowKey, caption, onSelect}) => html`<div class="table" tabindex="0" role="region"
  aria-label=${caption}><table>
  <thead><tr>${columns.map((column) => html`<th scope="col" class=${column.align}>${column.label}</th>`)}</tr></thead>
  <tbody>${rows.map((row, i) => html`<tr key=${rowKey?.(row) ?? i} class=${onSelect ? 'selectable' : ''}
    onClick=${onSelect && (() => onSelect(row))}>
    ${columns.map((column) => html`<td class=${column.align}>${column.render?.(row) ?? row[column.key]}</td>`)}
  </tr>`)}</tbody></table></div>`;

export function CopyButton({text, label = 'Copy', children, ...props}) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    await copyText(typeof text === 'function' ? text() : text);
    setDone(true);
    setTimeout(() => setDone(false), 1500);
  };
  return html`<${Button} kind="quiet" icon=${done ? 'check' : 'copy'} label=${done ? 'Copied' : label}
    ...${props} onClick=${copy}>${children}<//>`;
}

/** Puts text on the clipboard, also where the page is not served over HTTPS. */
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement('textarea');
  area.value = text;
  (document.querySelector('dialog[open]') ?? document.body).append(area);
  area.select();
  document.execCommand('copy');
  return area.remove();
}

/** Saves content (text or a Blob) as a file. */
export function download(name, content, type = 'application/json') {
  const url = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], {type}));
  Object.assign(document.createElement('a'), {href: url, download: name}).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

export function useStored(name, initial) {
  const [value, setValue] = useState(() => {
    try {
      return JSON.parse(localStorage.getItem(`cppbatch.${name}`)) ?? initial;
    } catch {
      return initial;
    }
  });
  useLayoutEffect(() => { // before what is stored is seen: an effect comes after the next frame, which a reload prevents
    try {
      localStorage.setItem(`cppbatch.${name}`, JSON.stringify(value));
    } catch { /* storage is full or forbidden: the value lasts as long as this page */ }
  }, [value]);
  return [value, setValue];
}

/** Calls `load`, and again after the milliseconds that it resolves to, while the page is shown; 0: not again. */
export function usePolling(load, active, dependencies) {
  useEffect(() => {
    if (!active) return undefined;
    let timer;
    let ended = false;
    const poll = async () => {
      clearTimeout(timer);
      const pause = await load(() => ended);
      if (pause && !ended && !document.hidden) timer = setTimeout(poll, pause);
    };
    const onVisible = () => { if (!document.hidden) poll(); };
    poll();
    document.addEventListener('visibilitychange', onVisible);
    return () => {
      ended = true;
      clearTimeout(timer);
      document.removeEventListener('visibilitychange', onVisible);
    };
  }, [active, ...dependencies]);
}

const TURN_MS = 12; // what is made in it is laid out as well, which takes longer
const AT_ONCE = 8;
let turnEnd = 0; // 0: the next who asks begins a turn
let isPlanned = false;
const waiting = new Set(); // the renderings for another turn. The last one is next: of a conversation it is the one in view

function plan() {
  if (!isPlanned) setTimeout(nextTurn);
  isPlanned = true;
}

function nextTurn() {
  [isPlanned, turnEnd] = [false, 0];
  for (const update of [...waiting].slice(-AT_ONCE).reverse()) {
    waiting.delete(update);
    update();
  }
  if (waiting.size) plan();
}

/** Work on long texts in turns, which all components share: hasTime() while this one lasts; again(): render in another. */
export function useTurns() {
  const [, update] = useReducer((n) => n + 1, 0);
  useEffect(() => () => waiting.delete(update), []);
  const hasTime = () => {
    if (!turnEnd) {
      turnEnd = performance.now() + TURN_MS;
      plan();
    }
    return performance.now() < turnEnd;
  };
  const again = () => {
    waiting.add(update);
    plan();
  };
  return {hasTime, again};
}

/**
 * Reloads the page when the server answers: browsers keep a module that failed as failed. If the module failed again
 * after a reload, the page and the server differ, and the page reloads only after the server was away.
 */
function reloadWhenBack(failure) {
  let isAway = sessionStorage.getItem('reloaded after') !== failure;
  const timer = setInterval(async () => {
    const answers = await fetch('health').then(() => true, () => false);
    if (!answers || !isAway) return void (isAway = !answers);
    clearInterval(timer);
    sessionStorage.setItem('reloaded after', failure);
    location.reload();
  }, 1000);
  return () => clearInterval(timer);
}

/** The component that `load` resolves to, once it is there. Its `load()` loads it before it is shown; `isLoaded()`. */
export function lazy(load, Before = null) {
  let Loaded = null;
  let loading = null;
  function Lazy(props) {
    const [error, setError] = useState(null);
    const [, update] = useReducer((n) => n + 1, 0);
    const isEarly = useRef(!Loaded).current; // it may be loaded between the first rendering and the effect
    useEffect(() => { if (isEarly) Lazy.load().then(update, setError); }, []);
    useEffect(() => (error ? reloadWhenBack(error.message) : undefined), [error]);
    if (Loaded) return html`<${Loaded} ...${props} />`;
    if (!error) return Before && html`<${Before} ...${props} />`;
    return html`<${EmptyState} title="This part of the page could not be loaded" icon="alert">
      ${error.message}. Reload the page. If that does not help, the server and the page have different versions.<//>`;
  }
  Lazy.load = () => {
    loading ??= load().then((component) => { Loaded = component; }).finally(() => { loading = null; });
    return loading;
  };
  Lazy.isLoaded = () => Loaded !== null;
  return Lazy;
}

/** Loads a stylesheet, whose address is relative to the module that wants it, unless index.html has it. */
export const stylesheet = (base, path) => new Promise((resolve, reject) => {
  const {href} = new URL(path, base);
  if ([...document.styleSheets].some((sheet) => sheet.href === href)) return resolve();
  const link = Object.assign(document.createElement('link'), {rel: 'stylesheet', href});
  Object.assign(link, {onload: resolve, onerror: () => reject(new Error(`${path} could not be loaded`))});
  return document.head.append(link);
});

let showToast = () => {};
let showConfirm = async () => false;

/** Shows a message for some seconds. kind: 'info' or 'error'. action: {label, act}, a button beside it. */
export const toast = (message, kind = 'info', action = null) =>
  showToast({message, kind, action, id: performance.now()});

/** Asks before something is done that cannot be undone. Resolves to whether to do it. */
export const confirmAction = (question) => showConfirm(question);

export function Toasts() {
  const [all, setAll] = useState([]);
  const drop = (one) => setAll((now) => now.filter((each) => each.id !== one.id));
  useEffect(() => {
    showToast = (one) => {
      setAll((now) => [...now.filter(({message}) => message !== one.message).slice(-3), one]);
      setTimeout(() => drop(one), one.kind === 'error' || one.action ? 9000 : 4000);
    };
  }, []);
  return html`<div class="toasts" role="status" aria-live="polite">
    ${all.map((one) => html`<div key=${one.id} class=${`toast ${one.kind}`}>
      <span>${one.message}</span>${one.action && html`<${Button} onClick=${() => { one.action.act(); drop(one); }}
        >${one.action.label}<//>`}</div>`)}</div>`;
}

export function Confirm() {
  const [question, setQuestion] = useState(null);
  useEffect(() => {
    showConfirm = (asked) => new Promise((resolve) => setQuestion({...asked, resolve}));
  }, []);
  const answer = (yes) => {
    question.resolve(yes);
    setQuestion(null);
  };
  return question && html`<${Dialog} open title=${question.title} onClose=${() => answer(false)} actions=${html`
    <${Button} onClick=${() => answer(false)}>${question.keep ?? 'Cancel'}<//>
    <${Button} kind="danger" onClick=${() => answer(true)}>${question.action ?? 'Delete'}<//>`}>
    <p>${question.message}</p><//>`;
}
