// The shell: header, tabs, API key, theme, and the state of the connection.
//
// A tab is the module <name>/<name>.js, which exports a Preact component named as in TABS. It is imported when the tab
// is first shown, and then stays mounted with its state. Its props:
//   active   whether the tab is shown. A tab that is not must do nothing, except what the reader started in it
//   server   {name, info: {props, model, models}, keyed, health}. props: GET /props; models: GET /v1/models; model: the
//            chosen one of these, at first the default; all null until a model is loaded. health: GET /health, with
//            status 'unreachable' if it fails
import {key, onKeyWanted, request, setKey} from './api.js';
import {
  Button, Confirm, Dialog, EmptyState, Field, Toasts, html, render, toast, useCallback, useEffect, useRef, useState,
  useStored,
} from './components.js';
import {percent} from './format.js';

const TABS = {chat: 'Chat', playground: 'Playground', live: 'Live', jobs: 'Jobs', models: 'Models'};
const THEMES = {auto: 'as the system', light: 'light', dark: 'dark'};
const UNKNOWN = {status: 'connecting', progress: 0};

const tabInHash = () => {
  const name = location.hash.slice(1).split('/')[0];
  return name in TABS ? name : 'chat';
};

const HEALTH = {
  connecting: ['', 'connecting'],
  ok: ['ok', 'ready'],
  loading: ['warning', 'loading the model'],
  sleeping: ['ok', 'asleep, wakes at a request'],
  restarting: ['warning', 'a worker restarts'],
  failed: ['error', 'the engine has failed'],
  closed: ['error', 'the server shuts down'],
  unreachable: ['error', 'server not reachable'],
};

/** Polls /health: every 5 seconds, every second while it is not ok, never while the page is hidden. */
function useHealth() {
  const [health, setHealth] = useState(UNKNOWN);
  useEffect(() => {
    let timer;
    let ended = false;
    async function poll() {
      clearTimeout(timer);
      const next = await fetch('health', {cache: 'no-store'}).then((response) => response.json())
        .catch(() => ({status: 'unreachable', progress: 0}));
      if (ended) return;
      setHealth((last) => (JSON.stringify(last) === JSON.stringify(next) ? last : next));
      if (!document.hidden) timer = setTimeout(poll, next.status === 'ok' ? 5000 : 1000);
    }
    const onVisible = () => { if (!document.hidden) poll(); };
    poll();
    document.addEventListener('visibilitychange', onVisible);
    return () => {
      ended = true;
      clearTimeout(timer);
      document.removeEventListener('visibilitychange', onVisible);
    };
  }, []);
  return health;
}

/** What is served: read again whenever the server has become ready. */
function useInfo(isUp, keyVersion) {
  const [info, setInfo] = useState({props: null, model: null, models: null});
  useEffect(() => {
    if (!isUp) return;
    Promise.all([request('/v1/models'), request('/props')])
      .then(([{data: models}, props]) =>
        setInfo({props, models, model: models.find((each) => each.default) ?? models[0] ?? null}))
      .catch((error) => { if (error.status !== 401) toast(error.message, 'error'); });
  }, [isUp, keyVersion]);
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
  const [error, setError] = useState(key() ? 'The server refuses the key that this browser has kept.' : '');
  const submit = async (event) => {
    event.preventDefault();
    const answer = await fetch('v1/models', {headers: {Authorization: `Bearer ${value.trim()}`}}).catch(() => null);
    if (answer?.status === 401) return setError('The server refuses this key.');
    if (!answer) return setError('The server cannot be reached.');
    setKey(value.trim());
    return onEnd(true);
  };
  const forget = () => {
    setKey('');
    onEnd(false);
  };
  return html`<${Dialog} open title="API key" onClose=${() => onEnd(false)}>
    <form onSubmit=${submit}>
      <p>This server wants an API key. It is kept in this browser, and sent in a header with each call.</p>
      <${Field} label="Key" error=${error}><input type="password" required autocomplete="off" spellcheck=${false}
        pattern="[!-~ ]+" autofocus value=${value} onInput=${(event) => setValue(event.target.value)} /><//>
      <div class="row end">
        ${key() && html`<${Button} onClick=${forget}>Forget the key<//>`}
        <${Button} kind="primary" type="submit">Use this key<//></div>
    </form><//>`;
}

const components = {};

/** Imports a tab's component, when the tab is first shown. */
async function importTab(name) {
  components[name] ??= (await import(`./${name}/${name}.js`))[TABS[name]];
  return components[name];
}

function Tab({name, active, server}) {
  const [{Component, error}, setLoaded] = useState({Component: components[name]});
  useEffect(() => {
    if (!Component) importTab(name).then((Component) => setLoaded({Component})).catch((error) => setLoaded({error}));
  }, []);
  if (Component) return html`<${Component} server=${server} active=${active} />`;
  if (!error) return null;
  return html`<${EmptyState} title=${`${TABS[name]} could not be loaded`} icon="alert">
    ${error.message}. Load the page again; if that does not help, the server is older or newer than this page.<//>`;
}

function App() {
  const [tab, setTab] = useState(tabInHash());
  const [opened, setOpened] = useState([tab]);
  const [keyRequest, setKeyRequest] = useState(null);
  const [keyVersion, setKeyVersion] = useState(0);
  const [keyed, setKeyed] = useState(Boolean(key()));
  const health = useHealth();
  const isUp = ['ok', 'sleeping', 'restarting'].includes(health.status);
  const served = useInfo(isUp, keyVersion);
  const [chosen, setChosen] = useStored('model', null);
  const info = {...served, model: served.models?.find((each) => each.id === chosen) ?? served.model};
  const main = useRef(null);
  const name = info.model?.id ?? null;

  useEffect(() => {
    const follow = () => {
      setTab(tabInHash());
      setOpened((now) => (now.includes(tabInHash()) ? now : [...now, tabInHash()]));
    };
    addEventListener('hashchange', follow);
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
      <${Tab} name=${each} active=${each === tab} server=${server} />
    </section>`)}</main>
    ${keyRequest && html`<${KeyDialog} onEnd=${endKey} />`}
    <${Confirm} /><${Toasts} />`;
}

await importTab(tabInHash()).catch(() => {});  // the tab says why
render(html`<${App} />`, document.getElementById('app'));
