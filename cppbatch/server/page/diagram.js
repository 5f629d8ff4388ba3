// @ts-check
// Diagrams by Mermaid, which is loaded with the first one. A frame draws them that reaches neither the page nor a network
// (diagram_frame.html); the page shows the result as an image, in which nothing runs, is loaded, or can be clicked.
//
//   Diagram {text}   children: its source as code, shown below it, and alone until it is drawn or if it cannot be drawn
import {html, stylesheet, useEffect, useState} from './components.js';

const LONGEST = 20_000; // characters
const MOST_MS = 10_000; // for one diagram: then the frame, which may hang, is replaced
const KEPT = 50; // diagrams

let opening = null; // of the frame
let turns = Promise.resolve();
const kept = new Map(); // what was drawn, by its source

async function open() {
  const [library] = await Promise.all([
    fetch(new URL('vendor/mermaid.js', import.meta.url)).then((response) => response.text()),
    stylesheet(import.meta.url, 'diagram.css'),
  ]);
  const frame = document.createElement('iframe');
  Object.assign(frame, {className: 'diagram-frame', title: 'Diagrams', tabIndex: -1, ariaHidden: 'true'});
  frame.sandbox.add('allow-scripts');
  frame.src = new URL('diagram_frame.html', import.meta.url).href;
  await new Promise((resolve) => {
    frame.onload = resolve;
    document.body.append(frame);
  });
  const {port1: port, port2} = new MessageChannel();
  await new Promise((resolve) => {
    port.onmessage = resolve;
    frame.contentWindow.postMessage(library, '*', [port2]); // '*': its origin has no name
  });
  return {frame, port};
}

/** {url, width, height}, or {error}. */
async function drawNow(text) {
  if (text.length > LONGEST) return {error: `it has ${text.length} characters; the limit is ${LONGEST}`};
  opening ??= open();
  const {frame, port} = await opening;
  const answer = await new Promise((resolve) => {
    const timer = setTimeout(() => resolve(null), MOST_MS);
    port.onmessage = ({data}) => {
      clearTimeout(timer);
      resolve(data);
    };
    port.postMessage(text);
  });
  if (answer?.svg) return {...answer, svg: null, url: `data:image/svg+xml;charset=utf-8,${encodeURIComponent(answer.svg)}`};
  if (answer) return answer;
  frame.remove();
  opening = null;
  return {error: `drawing it takes more than ${MOST_MS / 1000} seconds`};
}

function draw(text) {
  if (!kept.has(text)) {
    turns = turns.then(() => drawNow(text)).catch((error) => { // the library could not be loaded
      opening = null;
      kept.delete(text);
      return {error: error.message};
    });
    kept.set(text, turns);
    if (kept.size > KEPT) kept.delete(kept.keys().next().value);
  }
  return kept.get(text);
}

export function Diagram({text, children}) {
  const [drawn, setDrawn] = useState(null);
  useEffect(() => {
    let isLatest = true;
    setDrawn(null);
    draw(text).then((result) => { if (isLatest) setDrawn(result); });
    return () => { isLatest = false; };
  }, [text]);
  if (!drawn?.url) {
    return html`${children}${drawn && html`<p class="muted small" role="status">This diagram could not be drawn: ${
      drawn.error.split('\n')[0].replace(/[.:]*$/, '.')}</p>`}`;
  }
  const label = `Diagram: ${text.trim().split('\n')[0]}`;
  return html`<figure class="diagram"><div class="scroll" tabindex="0" role="group" aria-label=${label}>
      <img src=${drawn.url} width=${Math.ceil(drawn.width)} height=${Math.ceil(drawn.height)} alt=${label} /></div>
    <details><summary class="small muted">Source of the diagram</summary>${children}</details></figure>`;
}
