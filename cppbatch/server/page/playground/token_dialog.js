// The tokens of a cell, coloured by their probability, and the alternatives of one of them.
import {Dialog, html, useRef, useState} from '../components.js';
import {fixed, percent} from '../format.js';

const LEVELS = [0.9, 0.6, 0.3, 0.1, 0]; // each with a colour and a line of its own: .level0 to .level4

const level = (logprob) => LEVELS.findIndex((least) => Math.exp(logprob) >= least);
const visible = (text) => text.replaceAll(' ', '␣').replaceAll('\n', '↵').replaceAll('\t', '⇥') || '(no text)';

export function TokenDialog({run, cell, onClose}) {
  const [chosen, setChosen] = useState(0);
  const list = useRef(null);
  const onKeyDown = (event) => {
    const next = {ArrowRight: chosen + 1, ArrowLeft: chosen - 1, Home: 0, End: cell.tokens.length - 1}[event.key];
    if (next === undefined || !cell.tokens[next]) return;
    event.preventDefault();
    list.current.children[next].focus();
  };
  return html`<${Dialog} open wide title=${`Tokens: ${cell.name}`} onClose=${onClose}>
    <div class="token-scale small" aria-hidden="true">${LEVELS.map((least, i) => html`<span class=${`token level${i}`}>
      ${i ? `${percent(least)} to ${percent(LEVELS[i - 1])}` : `${percent(least)} or more`}</span>`)}</div>
    <div class="tokens" role="group" aria-label="Tokens; the arrow keys go to the next one" ref=${list} onKeyDown=${onKeyDown}>
      ${cell.tokens.map((token, i) => html`<${TokenButton} key=${i} token=${token} isChosen=${i === chosen}
        onChoose=${() => setChosen(i)} />`)}</div>
    <${Alternatives} token=${cell.tokens[chosen]} />
  <//>`;
}

const TokenButton = ({token, isChosen, onChoose}) => html`<button type="button" tabindex=${isChosen ? 0 : -1}
  class=${`token level${level(token.logprob)}`} aria-current=${isChosen || undefined} onFocus=${onChoose}
  onPointerEnter=${onChoose} title=${percent(Math.exp(token.logprob), 1)}
  aria-label=${`${visible(token.text)}, ${percent(Math.exp(token.logprob), 1)}`}>${
    token.text.includes('\n') ? html`${visible(token.text)}<br />` : token.text || '␃'}</button>`;

function Alternatives({token}) {
  const isListed = token.top.some(({text}) => text === token.text);
  const all = isListed ? token.top : [...token.top, token];
  return html`<table class="alternatives"><caption class="hidden-text">The token and its alternatives</caption>
    <thead><tr><th scope="col">Token</th><th scope="col" class="end">Probability</th><th></th>
      <th scope="col" class="end">Log-probability</th></tr></thead>
    <tbody>${all.map(({text, logprob}) => html`<tr class=${text === token.text ? 'taken' : ''}>
      <th scope="row"><span class="mono">${visible(text)}</span>${text === token.text && ' taken'}</th>
      <td class="end">${percent(Math.exp(logprob), 1)}</td>
      <td><meter value=${Math.exp(logprob)} max="1" aria-label="Probability"></meter></td>
      <td class="end">${fixed(logprob, 3)}</td></tr>`)}</tbody></table>`;
}
