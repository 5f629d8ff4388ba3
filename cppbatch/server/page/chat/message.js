// @ts-check
// One message: its text, thoughts, tool calls, figures, and what can be done with it.
import {request} from '../api.js';
import {Button, CopyButton, Icon, Notice, html, useEffect, usePolling, useRef, useState} from '../components.js';
import {count, percent, plural, rate, seconds} from '../format.js';
import {Markdown} from '../markdown.js';
import {Media} from './media_list.js';
import {adviceOf, isTooLong} from './answer.js';

const NAMES = {user: 'You', assistant: 'Assistant', tool: 'Tool result'};

const DEEPEST = 50; // levels of arguments that are indented: the text grows with the square of the depth

const isDeep = (args) => {
  let depth = 0;
  return (args.match(/[[\]{}]/g) ?? []).some((sign) => {
    depth += '[{'.includes(sign) ? 1 : -1;
    return depth > DEEPEST;
  });
};

const pretty = (args) => {
  if (isDeep(args)) return args;
  try {
    return JSON.stringify(JSON.parse(args), null, 2);
  } catch {
    return args; // not whole yet
  }
};

function Thoughts({text, isThinking}) {
  return html`<details class="thoughts"><summary>${isThinking ? 'Thinking …' : 'Thoughts'}</summary>
    <${Markdown} text=${text} streaming=${isThinking} /></details>`;
}

/** The calls of an answer. Below the last message the reader can give their results. */
function Calls({calls, onResults}) {
  const [results, setResults] = useState({});
  const submit = (event) => {
    event.preventDefault();
    onResults(calls.map(({id}, i) => ({callId: id, content: results[i] ?? ''})));
  };
  return html`<form class="stack" onSubmit=${submit}>
    ${calls.map(({name, args}, i) => html`<div class="card call" key=${i}>
      <div class="row"><${Icon} name="settings" /><span>calls <strong class="mono">${name}</strong></span></div>
      <pre tabindex="0">${pretty(args)}</pre>
      ${onResults && html`<label class="field"><span class="field-label">Result</span>
        <textarea rows="2" class="mono" required value=${results[i] ?? ''}
          onInput=${({target}) => setResults({...results, [i]: target.value})} /></label>`}
    </div>`)}
    ${onResults && html`<div class="row">
      <${Button} type="submit">Send ${calls.length > 1 ? 'results' : 'result'}<//></div>`}
  </form>`;
}

function Stats({stats}) {
  if (!stats) return null;
  const parts = [
    stats.tokens !== undefined && plural(stats.tokens, 'token'),
    stats.rate && rate(stats.rate),
    stats.ttft && `TTFT ${seconds(stats.ttft)}`,
    stats.prompt !== undefined && `prompt ${count(stats.prompt)}`,
    stats.cached && `${count(stats.cached)} cached`,
  ].filter(Boolean);
  return html`<span class="stats number" title="Tokens in the answer, tokens per second, time to first token (TTFT),
    prompt tokens, and prompt tokens taken from the prefix cache">${parts.join(' · ')}</span>`;
}

const POLL_MS = 1000;

/** How far the loading of a model is, null if it is not loading. model: of several; health: of a server with one. */
function useLoading(model, health) {
  const [loading, setLoading] = useState(null);
  usePolling(async () => {
    const {data} = await request('/v1/models').catch(() => ({data: []}));
    const status = data.find(({id, aliases}) => id === model || aliases?.includes(model))?.status;
    setLoading(status?.value === 'loading' ? status.progress ?? 0 : null);
    return POLL_MS;
  }, Boolean(model), [model]);
  return health?.status === 'loading' ? health.progress : loading;
}

function Waiting({progress, model, health}) {
  const loading = useLoading(progress ? null : model, health);
  let text = 'Waiting for the first token';
  if (!progress && loading !== null) text = `Loading ${model ?? 'the model'}: ${percent(loading)}`;
  else if (progress && progress.processed < progress.total) {
    text = `Processing the prompt: ${percent(progress.processed / progress.total)} of ${plural(progress.total, 'token')}`;
  }
  return html`<p class="muted waiting">${text} …</p>`;
}

/** What ended an answer too early, with the way to go on. */
function Ending({message, isLast, actions, health}) {
  const again = html`<${Button} onClick=${() => actions.regenerate(message)}>Try again<//>`;
  const goOn = message.content && !message.calls?.length && isLast
    && html`<${Button} onClick=${() => actions.continue(message)}>Continue<//>`;
  if (message.error) {
    return html`<${Notice} kind="error">${adviceOf(message.error, health, message.content)}
      ${isTooLong(message.error) && html`<details class="small"><summary>What the server says</summary>
        <p>${message.error.message}</p></details>`}
      <div class="row">${again}${goOn}</div><//>`;
  }
  const cut = {length: 'Reached the maximum number of tokens.', stopped: 'Stopped.', null: 'Interrupted.'}[message.finish];
  return cut && isLast ? html`<div class="row muted small">${cut}${goOn || again}</div>` : null;
}

function Editor({message, onSave, onCancel}) {
  const [text, setText] = useState(message.content);
  const input = useRef(null);
  useEffect(() => input.current.focus(), []);
  const onKeyDown = (event) => {
    if (event.key === 'Escape') onCancel();
    if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) onSave(text);
  };
  return html`<div class="stack editor">
    <textarea ref=${input} aria-label="Message text" value=${text} onKeyDown=${onKeyDown}
      onInput=${({target}) => setText(target.value)} />
    <div class="row"><${Button} kind="primary" disabled=${!text.trim() && !message.media} onClick=${() => onSave(text)}>
      ${message.role === 'user' ? 'Send' : 'Save as new version'}<//>
      <${Button} onClick=${onCancel}>Cancel<//></div>
  </div>`;
}

function Versions({at, of, message, actions}) {
  if (of < 2) return null;
  return html`<span class="row versions" role="group" aria-label="Versions of this message">
    <${Button} kind="quiet" icon="left" label="Previous version" disabled=${at === 0}
      onClick=${() => actions.choose(message, -1)} />
    <span class="number">${at + 1}/${of}</span>
    <${Button} kind="quiet" icon="right" label="Next version" disabled=${at === of - 1}
      onClick=${() => actions.choose(message, 1)} /></span>`;
}

/** Props: message; at, of: which of its versions; isRunning: it is being streamed; isBusy: this one or another is. */
export function Message({message, at, of, isLast, isRunning, isBusy, actions, health, model}) {
  const [isEdited, setEdited] = useState(false);
  const {role, content, reasoning, calls} = message;
  const isAnswer = role === 'assistant';
  const edit = (text) => {
    setEdited(false);
    actions.edit(message, text);
  };
  const isEmpty = isAnswer && !content && !reasoning && !calls?.length;
  return html`<article class=${`message ${role}`} aria-label=${NAMES[role]}>
    ${isEdited ? html`<${Editor} message=${message} onSave=${edit} onCancel=${() => setEdited(false)} />` : html`
    <div class="message-body">
      ${reasoning && html`<${Thoughts} text=${reasoning} isThinking=${isRunning && !content} />`}
      ${isAnswer ? html`<${Markdown} text=${content} streaming=${isRunning} />`
        : html`<${Media} media=${message.media} />
          ${content && html`<p class=${role === 'tool' ? 'plain mono' : 'plain'}>${content}</p>`}`}
      ${calls?.length > 0 && html`<${Calls} calls=${calls}
        onResults=${isLast && !isBusy ? (results) => actions.sendResults(message.id, results) : null} />`}
      ${isRunning && isEmpty && html`<${Waiting} progress=${message.progress} model=${model} health=${health} />`}
      ${!isRunning && isAnswer && html`<${Ending} message=${message} isLast=${isLast} actions=${actions}
        health=${health} />`}
    </div>`}
    ${isRunning && message.stats && html`<div class="message-tools"><${Stats} stats=${message.stats} /></div>`}
    ${!isRunning && !isEdited && html`<div class="message-tools">
      <${Versions} at=${at} of=${of} message=${message} actions=${actions} />
      <${CopyButton} text=${content} label="Copy text" />
      ${role !== 'tool' && html`<${Button} kind="quiet" icon="edit" label="Edit" disabled=${isBusy}
        onClick=${() => setEdited(true)} />`}
      ${isAnswer && html`<${Button} kind="quiet" icon="refresh" label="Regenerate answer" disabled=${isBusy}
        onClick=${() => actions.regenerate(message)} />`}
      <${Button} kind="quiet" icon="trash" label="Delete" disabled=${isBusy}
        onClick=${() => actions.remove(message)} />
      <${Stats} stats=${message.stats} /></div>`}
  </article>`;
}
