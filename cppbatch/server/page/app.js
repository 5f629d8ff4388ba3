// The shell: header, tabs, API key, theme, and the state of the connection.
//
// A tab is the module <name>/<name>.js, which exports a Preact component named as in TABS. Chat comes with the page, the
// others when they are first shown; then a tab stays mounted with its state. Its props:
//   active   whether the tab is shown. A tab that is not must do nothing, except what the reader started in it
//   server   {name, info: {props, model, models}, keyed, health}. models: GET /v1/models; model: the chosen one of these,
//            at first the default; props: GET /props, of several models with those of the chosen one if it is loaded;
//            all null until the server is ready. health: GET /health, with status 'unreachable' if it fails
import {key, onKeyWanted, request, setKey} from './api.js';
import {
  Button, Confirm, Dialog, Field, Toasts, html, lazy, render, toast, useCallback, useEffect, usePolling, useRef, useState,
  useStored,
} from './components.js';
import {Chat} from './chat/chat.js';
import {percent} from './format.js';

const TABS = {chat: 'Chat', playground: 'Playground', live: 'Live', jobs: 'Jobs', models: 'Models'};
const THEMES = {auto: 'system', light: 'light', dark: 'dark'};
const UNKNOWN = {status: 'connecting', progress: 0};

const tabInHash = () => {
  const name = location.hash.slice(1).split('/')[0];
  return name in TABS ? name : 'chat';
};

const HEALTH = {
  connecting: ['', 'connecting'],
  ok: ['ok', 'ready'],
  loading: ['warning', 'loading the model'],
  sleeping: ['ok', 'sleeping, wakes on request'],
  restarting: ['warning', 'a worker is restarting'],
  failed: ['error', 'the engine has failed'],
  closed: ['error', 'the server is shutting down'],
  unreachable: ['error', 'server unreachable'],
};

/** Polls /health: every 5 seconds, every second while it is not ok, never while the page is hidden. */
function useHealth() {
  const [health, setHealth] = useState(UNKNOWN);
  usePolling(async () => {
    const next = await fetch('health', {cache: 'no-store'}).then((response) => response.json())
      .catch(() => ({status: 'unreachable', progress: 0}));
    setHealth((last) => (JSON.stringify(last) === JSON.stringify(next) ? last : next));
    return next.status === 'ok' ? 5000 : 1000;
  }, true, []);
  return health;
}

/** What is served, and which model is chosen. Read again when the server has become ready, and when models are loaded. */
function useInfo(health, keyVersion, chosen) {
  const [info, setInfo] = useState({props: null, model: null, models: null});
  const isUp = ['ok', 'sleeping', 'restarting'].includes(health.status);
  const loaded = JSON.stringify(health.models);
  useEffect(() => {
    let isLatest = true;
    const read = async () => {
      const [{data: models}, general] = await Promise.all([request('/v1/models'), request('/props')]);
      const model = models.find(({id}) => id === chosen) ?? models.find((each) => each.default) ?? models[0] ?? null;
      const isLoaded = general.role === 'router' && model?.status.value === 'loaded';
      const own = isLoaded ? await request(`/props?model=${encodeURIComponent(model.id)}`) : {};
      if (isLatest) setInfo({props: {...general, ...own}, models, model});
    };
    if (isUp) read().catch((error) => { if (error.status !== 401) toast(error.message, 'error'); });
    return () => { isLatest = false; };
  }, [isUp, loaded, keyVersion, chosen]);
  return info;
}

function Health({health}) {
  const [kind, text] = HEALTH[health.status] ?? ['warning', health.status];
  const shown = health.status === 'loading' ? `${text} ${percent(health.progress)}` : text;
  return html`<div class=${`health ${kind}`} role="status" title=${health.error ?? ''}><span></span>${shown}</div>`;
}

function ThemeButton() {
  const names = Object.keys(THEMES);
  const [theme, setTheme] = useState(document.documentElement.dataset.theme ?? 'auto');
  const change = () => {
    const next = names[(names.indexOf(theme) + 1) % names.length];
    document.documentElement.dataset.theme = next;
    try {
      localStorage.setItem('cppbatch.theme', next);
    } catch { /* no storage: the theme lasts as long as this page */ }
    setTheme(next);
  };
  return html`<${Button} kind="quiet" icon="theme" label=${`Colours: ${THEMES[theme]}`} onClick=${change} />`;
}

/** Asks for the key. A key that the server refuses is not kept. */
function KeyDialog({onEnd}) {
  const [value, setValue] = useState('');
  const [error, setError] = useState(key() ? 'The server rejected the API key saved in this browser.' : '');
  const submit = async (event) => {
    event.preventDefault();
    const answer = await fetch('v1/models', {headers: {Authorization: `Bearer ${value.trim()}`}}).catch(() => null);
    if (answer?.status === 401) return setError('The server rejected this key.');
    if (!answer) return setError('Cannot reach the server.');
    setKey(value.trim());
    return onEnd(true);
  };
  const forget = () => {
    setKey('');
    onEnd(false);
  };
  return html`<${Dialog} open title="API key" onClose=${() => onEnd(false)}>
    <form onSubmit=${submit}>
      <p>This server requires an API key. It is saved in this browser and sent with each request.</p>
      <${Field} label="Key" error=${error}><input type="password" required autocomplete="off" spellcheck=${false}
        pattern="[!-~ ]+" autofocus value=${value} onInput=${(event) => setValue(event.target.value)} /><//>
      <div class="row end">
        ${key() && html`<${Button} onClick=${forget}>Forget key<//>`}
        <${Button} kind="primary" type="submit">Use key<//></div>
    </form><//>`;
}

const tabOf = (name) => lazy(() => import(`./${name}/${name}.js`).then((module) => module[TABS[name]]));
const COMPONENTS = {
  chat: Chat, playground: tabOf('playground'), live: tabOf('live'), jobs: tabOf('jobs'), models: tabOf('models'),
};

function App() {
  const [tab, setTab] = useState(tabInHash());
  const [opened, setOpened] = useState([tab]);
  const [keyRequest, setKeyRequest] = useState(null);
  const [keyVersion, setKeyVersion] = useState(0);
  const [keyed, setKeyed] = useState(Boolean(key()));
  const health = useHealth();
  const [chosen, setChosen] = useStored('model', null);
  const served = useInfo(health, keyVersion, chosen);
  const info = {...served, model: served.models?.find((each) => each.id === chosen) ?? served.model};
  const main = useRef(null);
  const name = info.model?.id ?? null;

  useEffect(() => {
    const follow = () => {
      setTab(tabInHash());
      setOpened((now) => (now.includes(tabInHash()) ? now : [...now, tabInHash()]));
    };
    addEventListener('hashchange', follow);
    ['dragover', 'drop'].forEach((type) => addEventListener(type, (event) => event.preventDefault())); // no file replaces the page
    onKeyWanted(() => new Promise((resolve) => {
      setKeyed(true);
      setKeyRequest({resolve});
    }));
    return () => removeEventListener('hashchange', follow);
  }, []);
  useEffect(() => { document.title = `${TABS[tab]} · ${name ?? 'cppbatch'}`; }, [tab, name]);

  const endKey = useCallback((given) => {
    keyRequest.resolve(given);
    setKeyRequest(null);
    if (given) setKeyVersion((now) => now + 1);
  }, [keyRequest]);

  const skip = (event) => {
    event.preventDefault();
    main.current.focus();
  };
  const server = {name, info, keyed, health};
  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to content</a>
    <header class="top">
      <div class="brand"><strong>cppbatch</strong>
        ${info.models?.length > 1
        ? html`<select class="model" aria-label="Model" value=${name} onChange=${({target}) => setChosen(target.value)}>
            ${info.models.map(({id}) => html`<option value=${id} key=${id}>${id}</option>`)}</select>`
        : name && html`<span class="model" title=${name}>${name}</span>`}</div>
      <nav aria-label="Tabs">${Object.entries(TABS).map(([each, label]) => html`<a href=${`#${each}`}
        aria-current=${each === tab ? 'page' : undefined}>${label}</a>`)}</nav>
      <div class="row tools"><${Health} health=${health} />
        ${keyed && html`<${Button} kind="quiet" icon="key" label="API key"
          onClick=${() => setKeyRequest({resolve: () => {}})} />`}
        <${ThemeButton} /></div>
    </header>
    <main id="main" ref=${main} tabindex="-1">${opened.map((each) => html`<section key=${each} class=${`tab ${each}`}
      aria-label=${TABS[each]} hidden=${each !== tab}><h1 class="hidden-text">${TABS[each]}</h1>
      <${COMPONENTS[each]} active=${each === tab} server=${server} />
    </section>`)}</main>
    ${keyRequest && html`<${KeyDialog} onEnd=${endKey} />`}
    <${Confirm} /><${Toasts} />`;
}

render(html`<${App} />`, document.getElementById('app'));
