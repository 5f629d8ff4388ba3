// The Models tab: what is loaded, what else the server has, whether it would fit into memory; load and unload.
import {events, request} from '../api.js';
import {
  Badge, Button, EmptyState, Notice, Progress, Table, confirmAction, html, lazy, stylesheet, toast, useCallback, useEffect,
  useReducer, useRef, useState,
} from '../components.js';
import {bytes, count, percent, plural, short} from '../format.js';
import {follow, whileVisible} from '../live/follow.js';
import {downloads, fitText} from './downloads.js';

await stylesheet(import.meta.url, 'models.css');

const HubDialog = lazy(() => import('./hub_dialog.js').then((module) => module.HubDialog));

const SILENCE = 40; // seconds: the stream of states has a comment every 15
const CHANGING = ['downloading', 'loading', 'unloading'];
const KINDS = {loaded: 'ok', downloading: 'warning', loading: 'warning', unloading: 'warning', sleeping: 'ok', failed: 'error'};
const HELP = {
  unloading: 'unloads after its last request; new requests wait',
  sleeping: 'idle; the next request wakes it',
};

const isFailed = (model) => Boolean(model.status.failed);
const isHere = (model) => ['loaded', 'sleeping', 'failed'].includes(model.status.value);

/** What a model's kind says about its answers. */
function kind(meta) {
  if (!meta) return '';
  if (meta.pooling === 'rank') return 'reranker';
  return meta.pooling ? `embeddings (${meta.pooling})` : 'text';
}

const State = ({model: {status}}) => html`<div class="model-state">
  <${Badge} kind=${status.failed ? 'error' : KINDS[status.value]}>${status.failed ? 'failed' : status.value}<//>
  ${status.value === 'loading' && html`<${Progress} value=${status.progress} label="Loading" />
    <span>${percent(status.progress)}</span>`}
  ${(status.error ?? HELP[status.value]) && html`<small>${status.error ?? HELP[status.value]}</small>`}</div>`;

const Name = ({model}) => html`<div class="model-name"><strong title=${model.path}>${model.id}</strong>
  ${model.default && html`<${Badge}>default<//>`}${model.pinned && html`<${Badge}>pinned<//>`}
  ${model.aliases.length > 0 && html`<small>also ${model.aliases.join(', ')}</small>`}
  ${model.meta && html`<small>${model.meta.description} · ${short(model.meta.n_params)} weights · ${kind(model.meta)}
    </small>`}
  ${model.architecture?.input_modalities.length > 1
    && html`<small>takes ${model.architecture.input_modalities.join(', ')}</small>`}</div>`;

function Context({meta}) {
  if (!meta) return '–';
  if (meta.n_parallel === undefined) return html`up to ${count(meta.n_ctx_train)} tokens`;
  return html`${plural(meta.n_parallel, 'sequence')}<small>${count(meta.n_cells)} KV cells, ${
    count(meta.max_sequence)} tokens for one</small>`;
}

/** Memory: what it takes, or whether it would fit now. */
function Memory({model}) {
  if (model.needs !== undefined) return bytes(model.needs);
  if (isHere(model) || model.fit === undefined) return '';
  return fitText(model.fit);
}

/** The models with their states: those of the page at first, then read again whenever a state has changed. */
function useModels(active, {models: known, props}) {
  const [state, setState] = useState({models: null, free: null, error: null});
  const counter = useRef({begun: 0, shown: 0});
  const read = useCallback((query = '') => {
    const mine = ++counter.current.begun;
    return request(`/v1/models${query}`).then(({data, free_memory: free}) => setState((last) => {
      const isOld = mine < counter.current.shown; // whether a model fits takes seconds to say: states may have changed
      counter.current.shown = Math.max(mine, counter.current.shown);
      const find = (models, model) => models?.find((each) => each.id === model.id);
      const models = (isOld ? last.models : data).map((model) =>
        ({status: {value: 'loaded'}, ...model, fit: (isOld ? find(data, model)?.fit : model.fit) ?? find(last.models, model)?.fit}));
      return {models, free: free ?? last.free, error: null};
    })).catch((error) => setState((last) => ({...last, error})));
  }, []);
  const settled = (state.models ?? []).map((model) => `${model.id} ${CHANGING.includes(model.status.value)
    ? '' : model.status.value}`).join('\n');
  useEffect(() => { if (active) read(); }, [active]);
  useEffect(() => { if (active && state.models) read('?fit=true'); }, [active, settled]);
  useEffect(() => {
    if (!active || props?.role !== 'router') return undefined;
    return whileVisible((signal) => {
      const open = (inner, onAlive) => {
        read();
        return events('/models/sse', {signal: inner, onAlive});
      };
      follow({open, silence: () => SILENCE, onEvent: () => read(), onState: () => {}}, signal);
    });
  }, [active, props?.role]);
  const models = state.models ?? known?.map((model) => ({status: {value: 'loaded'}, ...model}));
  return {...state, models, read};
}

/** What is being downloaded, or could not be. */
function Downloads() {
  const [, update] = useReducer((n) => n + 1, 0);
  useEffect(() => downloads.subscribe(update), []);
  return downloads.all.map(({model, completed, total, error}) => html`<div key=${model} class="card row download">
    <strong>${model}</strong>
    ${error ? html`<span class="grow field-error" role="alert">${error}</span>` : html`
      <span class="grow"><${Progress} value=${total ? completed / total : undefined} label=${`Download of ${model}`} /></span>
      <span class="number">${total ? `${bytes(completed)} of ${bytes(total)}` : 'asking the hub'}</span>`}
    <${Button} label=${`${error ? 'Dismiss' : 'Cancel the download of'} ${model}`}
      onClick=${() => downloads.cancel(model)}>${error ? 'Dismiss' : 'Cancel'}<//></div>`);
}

const Skeleton = () => html`<div class="page models" aria-busy="true"><p class="hidden-text" role="status">Reading the models</p>
  ${[0, 1, 2].map((i) => html`<div key=${i} class="card skeleton"></div>`)}</div>`;

export function Models({active, server}) {
  const {models, free, error, read} = useModels(active, server.info);
  const isRouter = server.info.props?.role === 'router';
  const change = async (model, action) => {
    try {
      await request(`/models/${action}`, {body: {model: model.id}});
      await read();
    } catch (failure) {
      toast(failure.message, 'error');
    }
  };
  const [isHubOpen, setHubOpen] = useState(false);
  const reload = () => read('?reload=true&fit=true');
  const download = (model) => downloads.start(model, () => {
    toast(`${model} is downloaded.`);
    reload();
  });
  const erase = async (model) => {
    const isFile = model.deletable === 'file';
    const yes = await confirmAction({title: `Delete ${model.id}?`, message: isFile
      ? `${model.path}${model.meta ? ` (${bytes(model.meta.size)})` : ''} is deleted on the server.`
      : `Only the name is deleted; the file ${model.path} stays.`});
    if (!yes) return;
    await request('/api/delete', {method: 'DELETE', body: {model: model.id}})
      .catch((failure) => toast(failure.message, 'error'));
    await reload();
  };
  if (!models) return error ? html`<${Notice} kind="error">${error.message}<//>` : html`<${Skeleton} />`;
  const columns = [
    {key: 'id', label: 'Model', render: (model) => html`<${Name} model=${model} />`},
    {key: 'status', label: 'State', render: (model) => html`<${State} model=${model} />`},
    {key: 'size', label: 'Size', align: 'end', render: (model) => bytes(model.meta?.size)},
    {key: 'context', label: 'At once', render: (model) => html`<${Context} meta=${model.meta} />`},
    ...(isRouter ? [
      {key: 'memory', label: 'Memory', render: (model) => html`<${Memory} model=${model} />`},
      {key: 'action', label: 'Action', render: (model) => html`<div class="row">${model.status.value !== 'unloading'
        && (isHere(model) || model.status.value === 'loading'
          ? html`<${Button} label=${`Unload ${model.id}`} onClick=${() => change(model, 'unload')}>Unload<//>`
          : html`<${Button} label=${`Load ${model.id}`}
              onClick=${() => change(model, 'load')}>${isFailed(model) ? 'Try again' : 'Load'}<//>`)}
        ${model.deletable && html`<${Button} kind="quiet" icon="trash" label=${`Delete ${model.id}`} onClick=${() => erase(model)} />`}</div>`},
    ] : []),
  ];
  return html`<div class="page models stack">
    ${error && html`<${Notice} kind="error">${error.message}<//>`}
    ${isRouter ? html`<div class="row"><p class="intro grow">A model is loaded on its first request; if there is no
        room, the least recently used idle model is unloaded. ${free !== null && html`${bytes(free)} of memory is free.`}</p>
        <${Button} onClick=${() => setHubOpen(true)}>Download a model<//>
        <${Button} onClick=${reload}>Rescan folder<//></div>
        <${Downloads} />
        ${isHubOpen && html`<${HubDialog} onDownload=${download} onClose=${() => setHubOpen(false)} />`}`
      : html`<${Notice}>This server has one model. To serve several, start it with a folder of GGUF files: ${' '}
        <code>cppbatch serve --models-dir DIR</code><//>`}
    ${server.info.props?.chat_forms && html`<p class="small muted">Tool calls: <code>${
      server.info.props.chat_forms.tool_calls}</code>${server.info.props.chat_forms.tools_described_by === 'message'
      && ' (the chat template does not render tools, so a message describes them)'}${server.info.props.chat_forms.thoughts
      && html`. Thoughts: <code>${server.info.props.chat_forms.thoughts}</code>`}</p>`}
    ${models.length === 0 ? html`<${EmptyState} title="No models">Download a model, or put GGUF files into the --models-dir folder and rescan it.<//>`
      : html`<${Table} caption="Models of this server" columns=${columns} rows=${models} rowKey=${(model) => model.id} />`}
  </div>`;
}
